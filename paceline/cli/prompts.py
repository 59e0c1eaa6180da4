"""The demo's prompts: two dozen word problems, written for it, and which of them it shows."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.measure.prompts import select_lines, thin_out
from paceline.prompt_file import InputLine

SHOWN = (
    "Mia paints 6 fences a week and gets $10 for each fence. How much money does she make in 3 weeks?",
    "Marco has 6 boxes of 3 crayons. He loses 4 crayons. How many crayons does he have left?",
    "Nina has 12 hens and twice as many ducks. How many birds does she have in total?",
    "Leo has 36 cards. Half of them are red. He gives 6 of the red cards away. How many red cards does he have left?",
)
"""Picked, from many, because the built-in target gets them right; so small a model gets most such problems wrong."""
PROMPTS = (
    *SHOWN,
    "Omar has 45 stamps. He buys 3 packs of 15 stamps and gives 20 stamps to his sister. How many stamps does he have?",
    "A train ticket costs $18 and a bus ticket costs $7. How much do 4 train tickets and 5 bus tickets cost together?",
    "Lena reads 24 pages a day. Her book has 312 pages. How many days does she need to finish the book?",
    "There are 6 shelves with 35 books each. 48 books are lent out. How many books remain on the shelves?",
    "A farmer collects 156 eggs and packs them into boxes of 12. Each box sells for $4. How much does he make?",
    "Nina saves $25 a week for 8 weeks. Then she spends $120 on a bicycle. How much money does she have left?",
    "A tank holds 500 liters. A pump fills 40 liters a minute. How many liters are missing after 9 minutes?",
    "Marco runs 5 miles on each weekday and 8 miles on Saturday. How many miles does he run in 3 weeks?",
    "A class has 28 students. Half of them play football and 6 play chess. How many students do neither?",
    "Tara buys 3 notebooks for $4 each and 2 pens for $3 each. She pays with $30. How much change does she get?",
    "A machine makes 75 toys an hour. How many toys does it make in 2 days if it runs 8 hours a day?",
    "Ivy has 60 beads. She uses 8 beads for each of 5 bracelets. How many beads are left?",
    "A shop sells apples for $2 each and pears for $3 each. How much do 15 apples and 10 pears cost?",
    "Sam drives 60 miles an hour for 3 hours and then 45 miles an hour for 2 hours. How far does he drive?",
    "A garden has 8 rows of 16 tulips. A third of the first 96 tulips are red. How many tulips are red?",
    "There were 240 people at a concert. 35 left early, and then half of the rest went home. How many stayed?",
    "A rope is 90 feet long. It is cut into 6 equal pieces. Two pieces are thrown away. How many feet are left?",
    "Paul buys a jacket for $80 with a discount of 25%. How much does he pay?",
    "A school orders 9 boxes of 24 pencils. Each of 50 students gets 4 pencils. How many pencils are left over?",
    "Mia bakes 36 cookies. She eats 4 and shares the rest equally among 8 friends. How many does each friend get?",
)


def selected_lines(path: Path | None, categories: Sequence[str] | None, count: int | None) -> list[InputLine]:
    """The lines a measurement is to use: of a file, or these prompts."""
    if path is not None:
        return select_lines(path, categories or (), count)
    if categories:
        raise InvalidRequest("--category chooses among the lines of a file; give --input too", field="category")
    return thin_out([InputLine(number, prompt) for number, prompt in enumerate(PROMPTS, 1)], count)

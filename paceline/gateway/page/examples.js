// Prompts to begin with, written for this page.

const CODE = `def total_price(items, tax):
    total = 0
    for item in items:
        total = total + item.price * item.count
    return total * (1 + tax)


def print_receipt(items, tax):
    for item in items:
        print(item.name, item.count, item.price)
    print("total", total_price(items, tax))
`;

const LIST = `- red kite, 3 sightings, north shore
- grey heron, 11 sightings, north shore
- red kite, 5 sightings, south shore
- grey heron, 2 sightings, south shore`;

/** By label: the prompt, and the prediction where there is one. */
export const EXAMPLES = {
  "Word problem": {
    prompt: "A baker fills 14 trays of 12 rolls and sells 130 of them before noon. How many rolls are left?",
  },
  "Text that repeats": {
    prompt: `Here is a list:\n${LIST}\n\nWrite the list twice more, without a change.`,
  },
  "Code edit": {
    prompt: `Rename the variable total to amount, change nothing else, and answer with the code alone.\n\n${CODE}`,
    prediction: CODE.replace("total = 0", "amount = 0")
      .replace("total = total +", "amount = amount +")
      .replace("return total", "return amount"),
  },
  "Short essay": {
    prompt: "Explain in five sentences why a queue grows long before its server is busy all the time.",
  },
};

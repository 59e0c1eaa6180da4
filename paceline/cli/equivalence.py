"""`paceline equivalence`: a comparison of outputs with those of the target alone."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.checks import check_sampling
from paceline.cli.consoles import words_console
from paceline.cli.options import (
    DRAFT_COUNT_HELP,
    POLICIES,
    Category,
    InputFile,
    MaxNewTokens,
    PromptCount,
    SourceSets,
    check_draft_count,
    comma_counts,
    comma_list,
    run_async,
    with_pair_flags,
)
from paceline.cli.progress import work_progress
from paceline.cli.prompts import selected_lines
from paceline.files import replace_file
from paceline.measure.equivalence.precision import AS_SERVED, NAMED_DTYPES, Precision
from paceline.measure.files import prepare_folder
from paceline.measure.prompts import MeasuredPrompt, encode_lines, read_text_codec
from paceline.measure.source_sets import ALL, read_source_set
from paceline.process.cluster_plan import ClusterOptions
from paceline.text import TextCodec
from paceline.types import SamplingParameters

if TYPE_CHECKING:
    from paceline.measure.equivalence.equivalence import Agreement, EquivalencePlan, EquivalenceResult

RESULT_FILE, TABLE_FILE = "equivalence.json", "equivalence.md"


@with_pair_flags
def command(
    input_file: InputFile = None,
    output: Annotated[Path, typer.Option(help="Folder for the result, and for references to go on from.")] = Path(
        "equivalence"
    ),
    category: Category = None,
    prompt_count: PromptCount = None,
    max_new_tokens: MaxNewTokens = 50,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are cut.")] = 1024,
    batch_sizes: Annotated[str, typer.Option(help="Generations in a round, with commas.")] = "1,4,8,32",
    policies: Annotated[
        str, typer.Option(help=f"How groups are formed, with commas: of {', '.join(POLICIES)}.")
    ] = ",".join(POLICIES),
    dtypes: Annotated[
        str, typer.Option(help=f"Types of weights and cache, with commas: of {', '.join(NAMED_DTYPES)}, {AS_SERVED}")
    ] = "float32,bfloat16,bfloat16-fast",
    draft_count: Annotated[str, typer.Option(help=DRAFT_COUNT_HELP)] = "5",
    source_sets: SourceSets = ALL,
    temperature: Annotated[float, typer.Option(help="0: greedy. More: sampled, beside plain decoding alone.")] = 0.0,
    *,
    pair: ClusterOptions,
) -> None:
    """Compare outputs with Hugging Face's, token for token. With plain decoding's too: raw text, first turns, greedy.

    Requests of a set that names `prediction` predict plain decoding's output, with every tenth token wrong. Exit status
    1 when float32 or strict outputs differ from what they must equal. Sampled outputs are compared with plain
    decoding's of the same seed alone, for Hugging Face draws by another rule.
    """
    check_draft_count(draft_count)
    check_sampling(SamplingParameters(temperature), vocabulary_size=0)  # no token is named
    batches = comma_counts("--batch-sizes", batch_sizes)
    chosen = comma_list("--policies", policies, POLICIES)
    precisions = tuple(Precision.parse(word, NAMED_DTYPES) for word in comma_list("--dtypes", dtypes))
    sets = tuple(map(read_source_set, comma_list("--source-sets", source_sets)))
    lines = selected_lines(input_file, category, prompt_count)
    prepare_folder(output)
    codec = read_text_codec(pair.target_model, pair.draft_model)
    prompts = encode_lines(lines, codec, chat=False, max_prompt_tokens=max_prompt_tokens)
    # Imported late: torch is slow to import.
    from paceline.measure.equivalence.equivalence import EquivalencePlan, EquivalenceResult

    pair = replace(pair, draft_count=draft_count)
    plan = EquivalencePlan(pair, max_new_tokens, batches, chosen, precisions, sets, temperature)
    source = str(input_file or "demo"), len(prompts)
    result = EquivalenceResult(pair.target_model, pair.draft_model, draft_count, *source, max_new_tokens, temperature)
    raise typer.Exit(1 if _Reporting(result, output, codec).run(plan, prompts).failed else 0)


class _Reporting:
    """Shows and saves every agreement as it comes, so that an interruption loses none."""

    def __init__(self, result: "EquivalenceResult", folder: Path, codec: TextCodec) -> None:
        self._result = result
        self._folder = folder
        self._codec = codec
        self._console = words_console(soft_wrap=True)

    def run(self, plan: "EquivalencePlan", prompts: list[MeasuredPrompt]) -> "EquivalenceResult":
        from paceline.measure.equivalence.equivalence import Equivalence, Observer

        try:
            with work_progress(words_console(stderr=True)) as work:
                observer = Observer(work.started, work.advanced, self._agreed)
                run_async(Equivalence(plan, prompts, self._codec, self._folder, observer).run())
        finally:
            self._summarise()
        return self._result

    def _agreed(self, agreement: "Agreement") -> None:
        from paceline.measure.equivalence.report import mismatch_lines

        self._result = replace(self._result, agreements=(*self._result.agreements, agreement))
        replace_file(self._folder / RESULT_FILE, self._result.to_json())
        for line in mismatch_lines(agreement, self._codec):
            self._console.print(line, style="red" if agreement.failed else "dim", markup=False)

    def _summarise(self) -> None:
        from paceline.measure.equivalence.report import category_table, equivalence_table

        if not self._result.agreements:
            return
        table = equivalence_table(self._result)
        replace_file(self._folder / TABLE_FILE, "\n".join((table, category_table(self._result.agreements))))
        self._console.print(table, markup=False)
        self._console.print(f"{self._folder / RESULT_FILE}, {self._folder / TABLE_FILE}", markup=False)

"""A model over ranks, here threads: outputs are Hugging Face's, over stages alone to the last bit one process's."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch

from paceline.engine import loading, numerics
from paceline.engine.calls import Call
from paceline.engine.interfaces import Span
from paceline.engine.loading import load_model, load_share
from paceline.engine.model import decoder
from paceline.engine.model.checkpoint import find_checkpoint
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.shares import check_divisible
from paceline.engine.numerics import check_ranks
from paceline.engine.options import EngineOptions
from paceline.engine.passes import FastPasses, Piece
from paceline.engine.placing import PackedRow
from paceline.engine.plan import BatchPlan
from paceline.engine.ranks.group import Group
from paceline.engine.ranks.links import Awaited
from paceline.engine.ranks.messages import Beat, End, LayOut, Message, RunPass, from_numbers, to_numbers
from paceline.engine.row_choice import DeviceChooser
from paceline.engine.runner import Runner
from paceline.engine.steps import StepRow, Steps
from paceline.engine.threads import kernel_threads, using_threads
from paceline.errors import StartupError
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.model_service.worker import ModelWorker
from paceline.types import GREEDY, RankGrid, RankPlace, Verdict, VerifyRow
from target_service.verifier import Verifier
from tests.checkpoints import FAMILIES, edit_config, write_model
from tests.conftest import PairOfCheckpoints
from tests.fakes.device_kernels import models_of_a_device
from tests.fakes.threaded_ranks import Channel, ChannelLinks, Channels, loaded_on_ranks
from tests.tools import built_kernels, kernels_of_a_gpu

SHARES, STAGES, BOTH = RankGrid(2, 1), RankGrid(1, 2), RankGrid(2, 2)
OPTIONS = EngineOptions(kv_memory="1MiB")
PROMPTS = [tuple(range(20 + n, 20 + n + length)) for n, length in enumerate((1, 2, 17, 40, 90))]
LIMIT = 12
TIMEOUT_S = 60


def spoken(runner: Runner, prompts: Sequence[tuple[int, ...]], expected: Sequence[Sequence[int]]) -> list[list[int]]:
    """Decode all prompts together, verifying drafts of which the second is wrong every time."""
    verifier = Verifier(runner)
    outputs: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    while waiting := [n for n, own in enumerate(outputs) if len(own) < len(expected[n])]:
        rows = []
        for n in waiting:
            known = (*prompts[n], *outputs[n])
            coming = expected[n][len(outputs[n]) :]
            drafts = [coming[0], (coming[1] + 1) % 300] if len(coming) > 2 else []
            rows.append(VerifyRow(str(n), cached[n], known[cached[n] :], tuple(drafts)))
        for n, verdict in zip(waiting, verifier.verify(rows), strict=True):
            drafted = rows[waiting.index(n)].draft_token_ids
            outputs[n] += [*drafted[: verdict.accepted_count], verdict.next_token_id]  # type: ignore[union-attr]
            cached[n] = verdict.cached_length  # type: ignore[union-attr]
    return outputs


def logits_of(model: LoadedModel) -> list[torch.Tensor]:
    """Return logits of passes over new, continued, shared and cut sequences."""
    runner = Runner(model, OPTIONS)
    long = tuple(range(40, 80))
    found = runner.forward([PackedRow("a", 0, long, 3), PackedRow("b", 0, (8, 9, 10))])
    found += runner.forward([PackedRow("c", 0, (*long[:33], 5, 6)), PackedRow("b", 2, (11, 12), 1)])
    # The cut goes into a page that others share, so the page is copied.
    runner.cache.truncate("a", 21)
    found += runner.forward([PackedRow("a", 21, (7, 8)), PackedRow("c", 35, (9,))])
    assert all(isinstance(one, torch.Tensor) for one in found)
    return [one for one in found if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize(
    ("family", "grid"),
    [
        pytest.param(family, grid, marks=() if (family, grid) in sampled else pytest.mark.long)
        for family in FAMILIES
        for grid in (SHARES, STAGES, BOTH)
        for sampled in ([("Llama", BOTH), ("Glm4", SHARES)],)
    ],
)
def test_outputs_over_ranks_equal_hugging_face(
    family: str, grid: RankGrid, pairs: dict[str, PairOfCheckpoints]
) -> None:
    target = pairs[family].target
    reference = HuggingFaceReference(str(target), "float32")
    expected = [reference.generate(prompt, LIMIT) for prompt in PROMPTS]
    with loaded_on_ranks(target, grid, OPTIONS) as model:
        assert spoken(Runner(model, OPTIONS), PROMPTS, expected) == expected


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if sampled == (family, dtype) else pytest.mark.long)
        for family in FAMILIES
        for dtype in ("float32", "bfloat16")
        for sampled in [("Qwen3", "bfloat16")]
    ],
)
def test_results_over_stages_are_those_of_one_process_to_the_last_bit(
    family: str, dtype: Any, pairs: dict[str, PairOfCheckpoints]
) -> None:
    alone = load_model(str(pairs[family].target), dtype, "cpu")
    expected = logits_of(alone)
    with loaded_on_ranks(pairs[family].target, STAGES, OPTIONS, dtype) as model:
        assert all(torch.equal(*both) for both in zip(logits_of(model), expected, strict=True))
        both = [Runner(one, OPTIONS).describe().identity.model_digest for one in (model, alone)]
        assert both[0] == both[1]


def test_over_stages_layers_without_compiled_kernels_are_strict_as_in_one_process(tmp_path: Path) -> None:
    """OLMo 2 takes stages alone, for its norms go over all heads of a token."""
    target, options = write_model(tmp_path, "Olmo2"), replace(OPTIONS, numerics="strict")
    expected = logits_of(load_model(str(target), "bfloat16", "cpu"))
    with loaded_on_ranks(target, STAGES, options, "bfloat16") as model:
        assert all(torch.equal(*both) for both in zip(logits_of(model), expected, strict=True))


def test_kernels_of_a_gpu_that_compiles_them_when_they_first_run_have_run_before_calls_come(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks record nothing, so the first call waited until all kernels of a layer and of choices were compiled."""
    done: list[str] = []
    run, choose = FastPasses.run, DeviceChooser.choose

    def noted_run(passes: FastPasses, pieces: Sequence[Piece]) -> Any:
        done.append("run")
        return run(passes, pieces)

    def noted_choose(chooser: DeviceChooser, *rows: Any) -> list[int]:
        done.append("choose")
        return choose(chooser, *rows)

    with models_of_a_device(), loaded_on_ranks(pairs["Llama"].target, SHARES, OPTIONS) as model:
        runner = Runner(model, OPTIONS)
        monkeypatch.setattr(FastPasses, "run", noted_run)
        monkeypatch.setattr(DeviceChooser, "choose", noted_choose)
        runner.record()
        assert done == ["run", "choose"]
        assert (runner.cache.sequence_count, runner.cache.held_bytes) == (0, 0)


def test_a_model_over_stages_of_gpus_that_are_strict_is_the_model_of_one(pairs: dict[str, PairOfCheckpoints]) -> None:
    """One process records its passes, of which stages give the same bits; as replicas they refused each other."""
    options = replace(OPTIONS, numerics="strict")
    with kernels_of_a_gpu():
        alone = Runner(load_model(str(pairs["Llama"].target), "bfloat16", "cpu"), options).describe()
        with loaded_on_ranks(pairs["Llama"].target, STAGES, options, "bfloat16") as model:
            over_stages = Runner(model, options).describe()
    assert over_stages.kernels == alone.kernels
    assert over_stages.identity.model_digest == alone.identity.model_digest


@pytest.mark.parametrize("grid", [SHARES, STAGES], ids=str)
def test_a_draft_over_ranks_proposes_what_one_process_does(grid: RankGrid, pairs: dict[str, PairOfCheckpoints]) -> None:
    options = replace(OPTIONS, takes_steps=True)
    rows = [StepRow(PackedRow(str(n), 0, prompt), GREEDY, 1 + n) for n, prompt in enumerate(PROMPTS)]
    expected = Steps(Runner(load_model(str(pairs["Llama"].draft), "float32", "cpu"), options)).run(rows)
    with loaded_on_ranks(pairs["Llama"].draft, grid, options) as model:
        assert Steps(Runner(model, options)).run(rows) == expected


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.long)])
def test_in_half_precision_no_row_over_shares_depends_on_the_others(quantization: Any, tmp_path: Path) -> None:
    wide = write_model(tmp_path, "Llama", intermediate_size=128)
    rows = [PackedRow(str(n), 0, tuple(range(9 + n, 40 + 7 * n))) for n in range(3)]
    with loaded_on_ranks(wide, SHARES, OPTIONS, "bfloat16", quantization) as model:
        runner = Runner(model, OPTIONS)
        assert "CompiledDecoder" in runner.describe().kernels and "2 shares" in runner.describe().kernels
        together = runner.forward(rows)
        runner.release([row.sequence_id for row in rows])
        alone = [runner.forward([row])[0] for row in rows]
    assert all(torch.equal(*both) for both in zip(together, alone, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("grid", [STAGES, BOTH], ids=str)
async def test_calls_that_follow_each_other_through_stages_change_no_output(
    grid: RankGrid, pairs: dict[str, PairOfCheckpoints]
) -> None:
    reference = HuggingFaceReference(str(pairs["Llama"].target), "float32")
    expected = [reference.generate(prompt, LIMIT) for prompt in PROMPTS]
    worker = ModelWorker(1, lanes=2)

    async def speak(runner: Runner, n: int) -> list[int]:
        output: list[int] = []
        while len(output) < len(expected[n]):
            known = (*PROMPTS[n], *output)
            row = VerifyRow(str(n), 0 if not output else len(known) - 1, known if not output else known[-1:], ())
            (verdict,), _ = await worker.run_call(Verifier(runner).verify_calls, Call([row]), len(row.token_ids))
            assert isinstance(verdict, Verdict)
            output.append(verdict.next_token_id)
            await worker.run(runner.rollback, [])
        return output

    with loaded_on_ranks(pairs["Llama"].target, grid, OPTIONS) as model:
        assert model.group
        model.group.while_waiting = worker.turns.let_go
        runner = Runner(model, OPTIONS)
        assert await asyncio.gather(*(speak(runner, n) for n in range(len(PROMPTS)))) == expected
    worker.close()


class ThreadsNoted(ChannelLinks):
    """Links of ranks that note how many threads each may use while its part of a sum is made."""

    def __init__(self, noted: dict[int, set[int]], place: RankPlace, channels: Channels, gathering: Channels) -> None:
        super().__init__(place, channels, gathering)
        self._noted = noted

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        self._noted[self._place.rank].add(kernel_threads())
        return super().gather(tensor)


def test_ranks_that_follow_leave_the_cores_to_a_draft_service_that_the_first_one_leaves(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    """They used all of `--threads` beside drafts, as if they were alone on the machine."""
    built_kernels()  # else a layer so small has one thread
    noted = defaultdict[int, set[int]](set)
    ranks = loaded_on_ranks(
        pairs["Llama"].target, SHARES, OPTIONS, links=partial(ThreadsNoted, noted), followers_threads=2
    )
    with using_threads(2), ranks as model:
        verifier = Verifier(Runner(model, OPTIONS), threads_beside_draft=1)
        for draft_token_ids, thread_count in (((), 2), ((5,), 1), ((), 2)):
            noted.clear()
            verifier.verify([VerifyRow("a", 0, (9, 10), draft_token_ids)])
            assert noted == {0: {thread_count}, 1: {thread_count}}


def test_the_pool_has_the_pages_that_every_rank_has_room_for(pairs: dict[str, PairOfCheckpoints]) -> None:
    # A rank has one of two KV heads, so a page of 16 tokens takes it half as much.
    with loaded_on_ranks(pairs["Llama"].target, SHARES, EngineOptions(kv_memory="64KiB")) as model:
        cache = Runner(model, EngineOptions(kv_memory="1MiB")).describe().cache
    assert (cache.token_bytes, cache.max_length) == (256, 256)


@pytest.mark.parametrize(
    ("memories", "sharing_count"), [(None, 4), (["one host", "another"], 2), (["a", "b", "c", "d"], 1)]
)
def test_ranks_divide_what_is_free_among_those_of_one_memory_alone(
    memories: list[str] | None,
    sharing_count: int,
    pairs: dict[str, PairOfCheckpoints],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank of a host took 60 % of what was free on all of it: four of them 240 %."""
    options = EngineOptions(kv_memory="50%")
    monkeypatch.setattr("paceline.engine.memory.free_bytes", lambda device: 1 << 20)
    if memories:
        names = cycle(memories)
        monkeypatch.setattr(loading, "memory_of", lambda device: next(names))
    with loaded_on_ranks(pairs["Llama"].target, BOTH, options) as model:
        assert Runner(model, options).cache.describe().capacity_bytes == (1 << 19) // sharing_count


def test_a_failed_pass_loses_the_group_for_good(pairs: dict[str, PairOfCheckpoints]) -> None:
    with loaded_on_ranks(pairs["Llama"].target, SHARES, OPTIONS) as model:
        assert model.group
        model.group.beat()
        with pytest.raises(ValueError, match="no"), model.group.in_step():
            raise ValueError("no")
        with pytest.raises(RuntimeError, match="gone"):
            model.group.beat()


class Clocks:
    """A clock for each thread, which goes on by what its rank does, and to when what it waits for was sent."""

    def __init__(self, rank_count: int) -> None:
        self.times_s = defaultdict[int, float](float)
        self._all = Barrier(rank_count)

    def work(self, seconds: float) -> None:
        self.times_s[get_ident()] += seconds

    def wait_for(self, sent_s: float) -> None:
        now_s = self.times_s[get_ident()]
        if sent_s > now_s + TIMEOUT_S:
            raise RuntimeError(f"nothing came for {TIMEOUT_S} s")
        self.times_s[get_ident()] = max(now_s, sent_s)

    def meet(self) -> None:
        self._all.wait(TIMEOUT_S)
        latest_s = max(self.times_s.values(), default=0)
        self._all.wait(TIMEOUT_S)
        self.times_s[get_ident()] = latest_s


class TimedLinks(ChannelLinks):
    """Links that fail a rank which waits for more than `TIMEOUT_S`, unless ranks meet."""

    def __init__(self, clocks: Clocks, place: RankPlace, channels: Channels, gathering: Channels) -> None:
        super().__init__(place, channels, gathering)
        self._clocks = clocks

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        super().send(torch.tensor(self._clocks.times_s[get_ident()]), rank)
        super().send(tensor, rank)

    def expect(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rank: int) -> Awaited:
        sent_s = super().expect((), torch.float32, device, rank)
        expected = super().expect(shape, dtype, device, rank)

        def awaited() -> torch.Tensor:
            self._clocks.wait_for(float(sent_s()))
            return expected()

        return awaited

    def meet(self) -> None:
        self._clocks.meet()


@pytest.mark.parametrize("step", ["take_share", "RankedDecoder"])
def test_ranks_whose_parts_are_made_minutes_apart_start_all_the_same(
    step: str, pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that copied its share, or laid its weights out, a minute longer than the first one failed the start."""
    clocks, make = Clocks(2), getattr(decoder, step)

    def make_slowly(made_of: Any, of: Any) -> Any:
        place = of.place if isinstance(of, Group) else of
        clocks.work(2 * TIMEOUT_S * place.rank)
        return make(made_of, of)

    monkeypatch.setattr(decoder, step, make_slowly)
    with loaded_on_ranks(pairs["Llama"].target, STAGES, OPTIONS, links=partial(TimedLinks, clocks)) as model:
        assert Runner(model, OPTIONS).cache
    assert min(clocks.times_s.values()) >= 2 * TIMEOUT_S


class AlikeOnly(ChannelLinks):
    """Links of ranks that go no further than to compare what they have loaded."""

    def meet(self) -> None:
        raise InterruptedError


DIVISIONS: list[tuple[str, dict[str, Any], RankGrid, str]] = [
    ("Llama", {}, RankGrid(3, 1), "--tensor-parallel 3 does not divide num_attention_heads 4, num_key_value_heads 2"),
    ("Llama", {}, RankGrid(4, 1), "--tensor-parallel 4 does not divide num_key_value_heads 2 .* take 1, 2$"),
    ("Llama", {}, RankGrid(1, 3), "--pipeline-parallel 3 does not divide num_hidden_layers 2 .* take 1, 2$"),
    ("Olmo2", {}, RankGrid(2, 1), "its norms go over all heads of a token"),
    (
        "Phi",
        {},
        RankGrid(4, 1),
        "--tensor-parallel 4 does not divide num_key_value_heads 2 of PhiForCausalLM; take 1, 2",
    ),
    (
        *("Phi", {"intermediate_size": 95}, RankGrid(2, 1)),
        r"--tensor-parallel 2 does not divide layers.\*.mlp.fc1.weight 95, .* of PhiForCausalLM; take 1$",
    ),
    (
        "Phi",
        {},
        RankGrid(1, 2),
        "--pipeline-parallel 2 cannot be had of PhiForCausalLM: layers of plain decoders alone",
    ),
    ("HunYuanDenseV1", {}, RankGrid(2, 1), "HunYuanDenseV1ForCausalLM: .* no tensor-parallel plan that divides"),
]


@pytest.mark.parametrize(("family", "changes", "grid", "words"), DIVISIONS)
def test_what_cannot_be_divided_is_refused_with_what_can(
    family: str, changes: dict[str, Any], grid: RankGrid, words: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path, family, **changes)

    def meet(on_gpu: bool) -> Any:
        raise AssertionError("it meets no other rank")

    with pytest.raises(StartupError, match=words):
        load_share(str(model), "auto", "cpu", "none", OPTIONS, RankPlace(1, grid), meet)


def test_each_number_that_a_refusal_names_divides_the_model() -> None:
    config = find_checkpoint("builtin:target").config
    with pytest.raises(StartupError, match=r"--tensor-parallel 2 does not divide .* take 1, 3$") as refused:
        check_divisible("LlamaForCausalLM", config, SHARES)
    _, _, named = refused.value.message.rpartition("take ")
    for count in map(int, named.split(", ")):
        check_divisible("LlamaForCausalLM", config, RankGrid(count, 1))


def test_ranks_round_no_rows(pairs: dict[str, PairOfCheckpoints]) -> None:
    """Each would round its part of a row by that part's largest number."""
    model, meet = str(pairs["Llama"].target), lambda on_gpu: None
    with pytest.raises(StartupError, match="--quantization w8a8 cannot be had of ranks; .* int8 or none"):
        load_share(model, "auto", "cpu", "w8a8", OPTIONS, RankPlace(0, SHARES), meet)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first_numerics", "second_numerics", "mixes_experts", "words"),
    [
        ("strict", "strict", False, "processor and kernels"),
        ("strict", "fast", False, "numerics"),
        ("fast", "fast", False, ""),
        # Each rank chooses experts by itself, so a near tie would add parts of two.
        ("fast", "fast", True, "processor and kernels"),
    ],
)
def test_ranks_of_other_numerics_and_strict_or_mixing_ones_on_machines_of_two_kinds_are_refused(
    first_numerics: Any,
    second_numerics: Any,
    mixes_experts: bool,
    words: str,
    pairs: dict[str, PairOfCheckpoints],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The identity of a replica tells what its first rank runs on, and outputs went on at others with other bits."""
    channels = {pair: Channel() for pair in product(range(2), range(2))}
    places = [RankPlace(rank, STAGES) for rank in range(2)]
    groups = [Group(place, ChannelLinks(place, channels, {}), torch.device("cpu")) for place in places]
    loaded = replace(load_model(str(pairs["Llama"].target), "float32", "cpu"), mixes_experts=mixes_experts)
    first, second = (replace(loaded, group=group) for group in groups)
    kinds = {groups[0]: "AMX", groups[1]: "AVX2"}
    monkeypatch.setattr(numerics, "kernels_of", lambda model, *_, **__: kinds[model.group])
    check_ranks(first, EngineOptions(numerics=first_numerics))
    with pytest.raises(StartupError, match=f"rank 1 differs .* {words}") if words else nullcontext():
        check_ranks(second, EngineOptions(numerics=second_numerics))


def write_other(folder: Path) -> Path:
    """Write the model of `write_model` with another configuration beside the same weights."""
    edit_config(write_model(folder, "Llama"), max_position_embeddings=256)
    return folder


@pytest.mark.parametrize(
    ("name", "second", "patched"),
    [
        ("weights", {"model": partial(write_model, family="Llama", seed=6)}, ""),
        ("configuration", {"model": write_other}, ""),
        ("dtype", {"dtype": "bfloat16"}, ""),
        ("quantization", {"quantization": "int8"}, ""),
        ("numbers of ranks", {"place": RankPlace(1, SHARES)}, ""),
        ("version of torch", {}, "torch"),
        ("version of transformers", {}, "transformers"),
        ("version of Paceline", {}, "paceline"),
    ],
)
def test_ranks_that_differ_in_what_they_load_are_refused_by_its_name(
    name: str, second: dict[str, Any], patched: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = {pair: Channel() for pair in product(range(2), range(2))}

    def load(place: RankPlace, model: Any, dtype: Any = "float32", quantization: Any = "none") -> None:
        folder = str(model(tmp_path / str(place.rank)))
        links = AlikeOnly(place, channels, {})
        load_share(folder, dtype, "cpu", quantization, OPTIONS, place, lambda on_gpu: links)

    own = {"model": partial(write_model, family="Llama")}
    with pytest.raises(InterruptedError):
        load(RankPlace(0, STAGES), **own)
    if patched:
        seen: Any = vars(loading).get(patched, loading)
        monkeypatch.setattr(seen, "__version__", f"{seen.__version__}+other")
    with pytest.raises(StartupError, match=f"rank 1 differs from rank 0 in its {name}; "):
        load(**({"place": RankPlace(1, STAGES)} | own | second))


@pytest.mark.parametrize(
    "message",
    [
        End(),
        Beat(),
        LayOut(7, 16, True),
        RunPass(BatchPlan([], [], 16), [], [], []),
        RunPass(BatchPlan([], [], 16), [], [], [], 3, True),
        RunPass(
            BatchPlan([Span("", 0, 3, 20), Span("", 3, 4, 1)], [[4, 9], [1]], 16), [(3, 4, 5)], [9, 8, 7, 6, 0], [2, 3]
        ),
    ],
)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert from_numbers(to_numbers(message)) == message

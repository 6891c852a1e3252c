"""The kernels' part of `gpu_check.py`: cases at real sizes, what else computes the same, and how they are timed."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from _gpu_report import Report, Row, Status, last_words
from torch import Tensor

from cbtriton.kernel_set import REFERENCE, implementations

# References that do not crawl at real sizes. The others gather row by row: not meant for a GPU. That of `kv_write`
# waits for the device once, so its time includes the host's.
FAST_REFERENCES = ("kv_write", "prepare_inputs", "block_copy")
# Below this floor a time is latency, and a share of the roofline would mean nothing.
SMALLEST_FLOOR_US = 2.0

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which cases are run.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Size of a head.
        pages: Page sizes.
        decode: (rows, context length) in the order of importance.
        prefill: (rows, query tokens, tokens before them), likewise.
        flex: Those of `decode` and `prefill` that FlexAttention, slow to compile, is tried on.
        vocab: Vocabulary.
        sampled: Rows that sample.
        written: Tokens written to the cache.
        prepared: (rows, tokens of each).
        copied: Blocks copied.
        table_shape: Rows and tokens of the request table.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    pages: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]
    flex: tuple[tuple[int, ...], ...]
    vocab: int
    sampled: tuple[int, ...]
    written: tuple[int, ...]
    prepared: tuple[tuple[int, int], ...]
    copied: int
    table_shape: tuple[int, int]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16."""
        return 4 * self.num_kv_heads * self.head_dim

    @property
    def pool_tokens(self) -> int:
        """Tokens of the largest case, and a page that belongs to nobody."""
        attended = [rows * length for rows, length in self.decode]
        attended += [rows * (count + context) for rows, count, context in self.prefill]
        copied = [2 * self.copied * page for page in self.pages]
        return max(*attended, *copied, *self.written) + (1 + max(rows for rows, _ in self.decode)) * max(self.pages)


REAL = Sizes(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    pages=(16, 256),
    decode=tuple((rows, length) for length in (4096, 32768, 1024) for rows in (32, 8, 1, 128)),
    prefill=((1, 4096, 0), (4, 2048, 0), (1, 512, 8192)),
    flex=((32, 4096), (1, 4096, 0), (1, 512, 8192)),
    vocab=128_256,
    sampled=(1, 8, 64, 256),
    written=(64, 8192),
    prepared=((256, 1), (4, 2048)),
    copied=64,
    table_shape=(1024, 8192),
)
TINY = Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    pages=(4, 16),
    decode=((1, 5), (3, 20)),
    prefill=((1, 9, 0), (2, 5, 0), (1, 4, 12)),
    flex=((1, 9, 0),),
    vocab=257,
    sampled=(1, 3),
    written=(3, 7),
    prepared=((3, 1), (2, 5)),
    copied=3,
    table_shape=(8, 64),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs on the device, and how they are run.

    Attributes:
        num_bytes: Bytes that must move: each input read once, each output written once.
        num_flops: Floating-point operations that must be done.
        bind: An implementation's module -> the call that is timed.
        check: Result of such a call -> its error.
        allowed: Largest error of a right result.
        peers: What else computes the same.
        bind_plan: An attention module -> the call that plans a step.
    """

    num_bytes: float
    num_flops: float
    bind: Callable[[Any], Call]
    check: Callable[[Any], float]
    allowed: float
    peers: dict[str, Call]
    bind_plan: Callable[[Any], Call] | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """A case that is not built yet: its tensors would not all fit at a time."""

    slot: str
    name: str
    build: Callable[[], Case]
    only_peers: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time on the device and on the host of a call, and the first call's time."""

    time_us: float
    launch_us: float
    first_call_s: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches at best, as measured; copying counts bytes read and written.

    Attributes:
        copy_gb_per_s: A large copy within the device.
        matmul_tflop_per_s: A large bf16 matrix product of random numbers.
        empty_us: What the clock shows for a call that does nothing; it is part of every other time.
    """

    copy_gb_per_s: float
    matmul_tflop_per_s: float
    empty_us: float

    def floor_us(self, num_bytes: float, num_flops: float) -> float:
        """The least time that so much work takes."""
        return max(num_bytes / (1e3 * self.copy_gb_per_s), num_flops / (1e6 * self.matmul_tflop_per_s))


class Timer(Protocol):
    """Measures calls that run on one device."""

    def measure(self, call: Call) -> Timing:
        """Times a call."""
        ...

    def ceilings(self) -> Ceilings:
        """What the device can do."""
        ...


class CudaTimer:
    """Times calls by events, each after the L2 cache was filled with something else.

    Filling it takes the device longer than the host needs to launch the call behind it, so the time between the two
    events is the device's alone. It only reads: lines that still had to be written back would slow the call down.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filler = torch.ones(1 << 29, device=device)
        self._sum = torch.empty((), device=device)

    def measure(self, call: Call) -> Timing:
        """See `Timer.measure`."""
        first_call_s = self._wall_seconds(call)
        self._wall_seconds(call)
        repeats = min(40, max(7, int(0.06 / self._wall_seconds(call))))
        pairs = [(self._event(), self._event()) for _ in range(repeats)]
        for begin, finish in pairs:
            torch.sum(self._filler, dim=0, out=self._sum)
            begin.record()
            call()
            finish.record()
        torch.cuda.synchronize(self._device)
        launches = []
        for _ in range(15):
            started = time.perf_counter()
            call()
            launches.append(time.perf_counter() - started)
        torch.cuda.synchronize(self._device)
        times = [begin.elapsed_time(finish) for begin, finish in pairs]
        return Timing(1e3 * median(times), 1e6 * median(launches), first_call_s)

    def ceilings(self) -> Ceilings:
        """See `Timer.ceilings`."""
        source = torch.rand(1 << 30, device=self._device)
        target = torch.empty_like(source)
        copy_us = self.measure(partial(target.copy_, source)).time_us
        del source, target
        size = 8192
        left, right = (torch.randn(size, size, device=self._device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        matmul_us = self.measure(partial(torch.matmul, left, right, out=out)).time_us
        empty_us = self.measure(lambda: None).time_us
        return Ceilings(2 * (4 << 30) / (1e3 * copy_us), 2 * size**3 / (1e6 * matmul_us), empty_us)

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _wall_seconds(self, call: Call) -> float:
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        call()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


class DryTimer:
    """Runs a call once, and makes up its time."""

    def measure(self, call: Call) -> Timing:
        """See `Timer.measure`."""
        call()
        return Timing(100.0, 1.0, 0.001)

    def ceilings(self) -> Ceilings:
        """So low that tiny cases have a share of the roofline."""
        return Ceilings(copy_gb_per_s=0.1, matmul_tflop_per_s=0.001, empty_us=1.0)


def measure_kernels(task: dict[str, Any], report: Report) -> None:
    """A worker's run over all cases, except what is done already."""
    device = torch.device("cpu" if task["is_dry"] else "cuda")
    torch.manual_seed(0)
    timer: Timer = DryTimer() if task["is_dry"] else CudaTimer(device)
    report.write(device=device_facts(device))
    ceilings = timer.ceilings()
    report.write(ceilings=dataclasses.asdict(ceilings))
    done = {(case, who) for case, who in task["done"]}
    measurer = Measurer(device, timer, ceilings, report, task["deadline"], done)
    for spec in Bench(TINY if task["is_dry"] else REAL, device).specs():
        measurer.run(spec)
    # Clocks right after the load.
    report.write(device_afterwards=device_facts(device))


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, memory, driver and clocks of a GPU, as far as torch tells them."""
    if device.type != "cuda":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    facts: dict[str, Any] = {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "processors": properties.multi_processor_count,
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
        "cuda": torch.version.cuda,
    }
    # These need pynvml and a driver that answers.
    for name in ("clock_rate", "temperature", "power_draw"):
        try:
            facts[name] = getattr(torch.cuda, name)(device)
        except Exception as error:
            facts[name] = f"unknown: {type(error).__name__}"
    try:
        from torch.utils import collect_env

        facts["driver"] = collect_env.get_nvidia_driver_version(collect_env.run)
    except Exception as error:
        facts["driver"] = f"unknown: {type(error).__name__}"
    return facts


class Measurer:
    """Runs cases and reports a row for each implementation and peer, within the time.

    Args:
        device: Where the cases are.
        timer: Measures the calls.
        ceilings: What the device can do.
        report: Takes the rows.
        deadline: Nothing is begun after this time, on the monotonic clock.
        done: (case, name) of what an earlier worker reported.
    """

    def __init__(
        self,
        device: torch.device,
        timer: Timer,
        ceilings: Ceilings,
        report: Report,
        deadline: float,
        done: set[tuple[str, str]],
    ) -> None:
        self._is_gpu = device.type == "cuda"
        self._timer = timer
        self._ceilings = ceilings
        self._report = report
        self._deadline = deadline
        self._done = done

    def run(self, spec: Spec) -> None:
        """Builds a case and measures everything that computes it."""
        if (spec.name, "all") in self._done:
            return
        names = [] if spec.only_peers else self._names(spec.slot)
        if time.monotonic() > self._deadline:
            for who in names or ["flex"]:
                self._finish(spec, Row("kernels", spec.name, who, "skipped", note="no time left"))
            return
        self._report.write(doing=[spec.name, "all"])
        try:
            case = spec.build()
        except TooLargeError as error:
            self._report.row(Row("kernels", spec.name, "all", "skipped", note=str(error)))
            return
        except Exception as error:
            is_ours = not isinstance(error, torch.OutOfMemoryError)
            self._report.row(
                Row("kernels", spec.name, "all", "failed" if is_ours else "skipped", note=last_words(error))
            )
            stop_if_device_is_lost()
            return
        for name, call in case.peers.items():
            self._one(spec, name, "unavailable", partial(self._measure_peer, spec, case, name, call))
        for name in names:
            self._one(spec, name, "failed", partial(self._measure_own, spec, case, name))

    def _names(self, slot: str) -> list[str]:
        """The implementations that run here at these sizes."""
        from triton import knobs

        has_triton = self._is_gpu or knobs.runtime.interpret
        names = [name for name in implementations(slot) if name != REFERENCE and has_triton]
        return names if self._is_gpu and slot not in FAST_REFERENCES else [*names, REFERENCE]

    def _one(self, spec: Spec, who: str, status: Status, measure: Callable[[], Row]) -> None:
        if (spec.name, who) in self._done:
            return
        self._report.write(doing=[spec.name, who])
        try:
            row = measure()
        except Exception as error:
            row = Row("kernels", spec.name, who, status, note=last_words(error))
            self._finish(spec, row)
            stop_if_device_is_lost()
            return
        self._finish(spec, row)

    def _finish(self, spec: Spec, row: Row) -> None:
        if (spec.name, row.who) not in self._done:
            self._report.row(row)

    def _measure_peer(self, spec: Spec, case: Case, name: str, call: Call) -> Row:
        return self._row(spec, case, name, self._timer.measure(call))

    def _measure_own(self, spec: Spec, case: Case, name: str) -> Row:
        module = importlib.import_module(f"cbtriton.kernels.{spec.slot}.{name}")
        call = case.bind(module)
        row = self._row(spec, case, name, self._timer.measure(call))
        error = case.check(call())
        if case.bind_plan is not None:
            row = dataclasses.replace(row, plan_us=self._timer.measure(case.bind_plan(module)).time_us)
        # Written this way round, NaN is not allowed either.
        if not error <= case.allowed:
            row = dataclasses.replace(row, status="failed", note=f"error {error:.3g}, allowed {case.allowed:.3g}")
        return dataclasses.replace(row, error=error)

    def _row(self, spec: Spec, case: Case, who: str, timing: Timing) -> Row:
        floor = self._ceilings.floor_us(case.num_bytes, case.num_flops)
        return Row(
            "kernels",
            spec.name,
            who,
            "ok",
            time_us=timing.time_us,
            floor_us=floor,
            roofline=floor / timing.time_us if floor >= SMALLEST_FLOOR_US else None,
            gb_per_s=case.num_bytes / (1e3 * timing.time_us),
            tflop_per_s=case.num_flops / (1e6 * timing.time_us) if case.num_flops else None,
            launch_us=timing.launch_us,
            first_call_s=timing.first_call_s,
        )


def stop_if_device_is_lost() -> None:
    """After an illegal access every later call of this process would fail: another worker must go on."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class TooLargeError(ValueError):
    """A case needs more memory than this device has."""


class Bench:
    """Builds the cases on one device.

    Args:
        sizes: Which ones.
        device: Where.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes = sizes
        self._device = device
        tokens = sizes.pool_tokens
        if device.type == "cuda":
            # Attention's peers need as much again, in one piece.
            tokens = min(tokens, int(0.4 * torch.cuda.mem_get_info(device)[0]) // sizes.token_bytes)
        shape = (tokens, sizes.num_kv_heads, sizes.head_dim)
        self._keys, self._values = self._normal(*shape), self._normal(*shape)

    def specs(self) -> Iterator[Spec]:
        """All cases, the most telling ones first."""
        sizes = self._sizes
        yield from self._decode_specs(sizes.decode[:4])
        yield from self._prefill_specs()
        for kind in SAMPLERS:
            for rows in sizes.sampled:
                name = f"sample {kind} B={rows} V={sizes.vocab}"
                yield Spec("sample", name, partial(self._sample, rows, kind))
        for tokens in sizes.written:
            yield Spec("kv_write", f"kv_write T={tokens}", partial(self._kv_write, tokens))
        for rows, count in sizes.prepared:
            name = f"prepare_inputs R={rows} T={rows * count}"
            yield Spec("prepare_inputs", name, partial(self._prepare_inputs, rows, count))
        for page in sizes.pages:
            name = f"block_copy n={sizes.copied} page={page}"
            yield Spec("block_copy", name, partial(self._block_copy, page))
        yield from self._decode_specs(sizes.decode[4:])
        yield from self._flex_specs()

    def _decode_specs(self, cases: Sequence[tuple[int, int]]) -> Iterator[Spec]:
        for rows, length in cases:
            for page in self._sizes.pages:
                build = partial(self._attention, "decode_attention", rows, 1, length - 1, page, with_flex=False)
                yield Spec("decode_attention", _decode_name(rows, length, page), build)

    def _prefill_specs(self) -> Iterator[Spec]:
        for rows, count, context in self._sizes.prefill:
            for page in self._sizes.pages:
                build = partial(self._attention, "varlen_attention", rows, count, context, page, with_flex=False)
                yield Spec("varlen_attention", _prefill_name(rows, count, context, page), build)

    def _flex_specs(self) -> Iterator[Spec]:
        page = self._sizes.pages[0]
        for case in self._sizes.flex:
            if len(case) == 2:
                rows, length = case
                slot, name, spans = "decode_attention", _decode_name(rows, length, page), (rows, 1, length - 1)
            else:
                rows, count, context = case
                slot, name, spans = "varlen_attention", _prefill_name(rows, count, context, page), case
            yield Spec(slot, name, partial(self._attention, slot, *spans, page, with_flex=True), only_peers=True)

    # ---- attention

    def _attention(self, slot: str, rows: int, count: int, context: int, page: int, with_flex: bool) -> Case:
        sizes, device = self._sizes, self._device
        length = context + count
        keys, values = self._caches(page)
        num_blocks = -(-length // page)
        if rows * num_blocks >= len(keys):
            need = 2 * rows * length * sizes.token_bytes / 2**30
            raise TooLargeError(f"needs about {need:.1f} GiB, of which this device has too little left")
        # Block 0 belongs to nobody.
        blocks = torch.randperm(len(keys) - 1, device=device)[: rows * num_blocks] + 1
        tables = blocks.to(torch.int32).view(rows, num_blocks)
        entries = torch.randperm(rows, device=device).to(torch.int32)
        seq_lens = torch.full((rows,), length, dtype=torch.int32, device=device)
        cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device) * count
        # A slice of a fused projection, as models hand it over.
        fused = self._normal(rows * count, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim)
        query = fused[:, : sizes.num_heads]
        scale = sizes.head_dim**-0.5
        lengths = (seq_lens,) if slot == "decode_attention" else (cu_seqlens_q, seq_lens)

        def bind_plan(module: Any) -> Call:
            return partial(module.plan, tables, entries, cu_seqlens_q, seq_lens, page, length)

        def bind(module: Any) -> Call:
            plan = bind_plan(module)()
            attend = getattr(module, slot)
            where = (query, keys, values, tables, entries, *lengths)
            return partial(attend, *where, plan, scale, 0, 0.0, None, length)

        dense = DenseAttention(
            query.unflatten(0, (rows, count)),
            self._gather(keys, tables, entries, length),
            self._gather(values, tables, entries, length),
            context,
        )
        pairs = rows * (count * context + count * (count + 1) / 2)
        return Case(
            num_bytes=rows * length * sizes.token_bytes + 2 * query.numel() * query.element_size() + 4 * tables.numel(),
            num_flops=4 * pairs * sizes.num_heads * sizes.head_dim,
            bind=bind,
            check=partial(_relative_error, expected=cache_call(dense.sdpa)),
            allowed=2e-2,
            peers={"flex": dense.flex(device)} if with_flex else dense.peers(),
            bind_plan=bind_plan,
        )

    @staticmethod
    def _gather(cache: Tensor, tables: Tensor, entries: Tensor, length: int) -> Tensor:
        """`[rows, length, Hkv, D]` in one piece."""
        blocks = tables[entries.long()]
        gathered = cache.index_select(0, blocks.flatten().long())
        return gathered.view(len(blocks), -1, *cache.shape[2:])[:, :length]

    # ---- the rest

    def _sample(self, num_rows: int, kind: str) -> Case:
        sizes, device = self._sizes, self._device
        sampler = SAMPLERS[kind]
        table_rows = max(num_rows, sizes.table_shape[0])
        logits = 3 * self._normal(num_rows, sizes.vocab)

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((table_rows,), value, dtype=dtype, device=device)

        args = (
            logits,
            torch.randperm(table_rows, device=device)[:num_rows].to(torch.int32),
            torch.randint(0, sizes.table_shape[1], (num_rows,), dtype=torch.int32, device=device),
            torch.zeros(table_rows, sizes.table_shape[1], dtype=torch.int32, device=device),
            column(sampler.temperature, torch.float32),
            column(sampler.top_k, torch.int32),
            column(sampler.top_p, torch.float32),
            column(0.0, torch.float32),
            torch.randint(-(2**62), 2**62, (table_rows,), device=device),
            column(0, torch.int32),
            torch.full((table_rows, 16), -1, dtype=torch.int32, device=device),
        )
        flags = (sampler.temperature == 0, sampler.top_k > 0, sampler.top_p < 1, False, False, False)

        def bind(module: Any) -> Call:
            return partial(module.sample, *args, *flags)

        def wrong_share(result: tuple[Tensor, Tensor, Tensor]) -> float:
            tokens, _, outcomes = result
            chosen = logits.gather(1, tokens[:, None].clamp(0, sizes.vocab - 1))[:, 0].float()
            is_right = (outcomes == 0) & (tokens >= 0) & (tokens < sizes.vocab) & (chosen >= sampler.least(logits))
            return 1 - is_right.float().mean().item()

        return Case(
            num_bytes=logits.numel() * logits.element_size(),
            num_flops=0,
            bind=bind,
            check=wrong_share,
            allowed=0.0,
            peers={"torch": partial(sampler.draw, logits)},
        )

    def _kv_write(self, num_tokens: int) -> Case:
        sizes = self._sizes
        keys, values = self._caches(sizes.pages[0])
        fused = self._normal(num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim)
        key = fused[:, sizes.num_heads : sizes.num_heads + sizes.num_kv_heads]
        value = fused[:, sizes.num_heads + sizes.num_kv_heads :]
        num_slots = len(keys) * sizes.pages[0]
        slots = torch.randperm(num_slots, device=self._device)[:num_tokens]

        def wrong_share(_: object) -> float:
            written = [cache.flatten(0, 1)[slots] for cache in (keys, values)]
            return max((got != asked).float().mean().item() for got, asked in zip(written, (key, value), strict=True))

        def bind(module: Any) -> Call:
            # So that nothing is there already.
            keys.flatten(0, 1)[slots] = 0
            values.flatten(0, 1)[slots] = 0
            return partial(module.kv_write, key, value, keys, values, slots)

        num_bytes = 2 * num_tokens * sizes.token_bytes + 8 * num_tokens
        return Case(num_bytes, 0, bind, wrong_share, 0.0, {})

    def _prepare_inputs(self, rows: int, count: int) -> Case:
        sizes, device, page = self._sizes, self._device, self._sizes.pages[0]
        table_rows, max_len = sizes.table_shape
        token_table = torch.randint(0, sizes.vocab, (table_rows, max_len), dtype=torch.int32, device=device)
        block_tables = torch.randint(1, 10_000, (table_rows, -(-max_len // page)), dtype=torch.int32, device=device)
        entries = torch.randperm(table_rows, device=device)[:rows].to(torch.int32)
        starts = torch.randint(0, max_len - count, (rows,), dtype=torch.int32, device=device)
        counts = torch.full((rows,), count, dtype=torch.int32, device=device)
        page_sizes = torch.tensor([page], dtype=torch.int32, device=device)
        args = (token_table, block_tables[None], entries, starts, counts, page_sizes, rows * count)

        def bind(module: Any) -> Call:
            return partial(module.prepare_inputs, *args)

        def wrong_share(result: tuple[Tensor, ...]) -> float:
            reference = importlib.import_module(f"cbtriton.kernels.prepare_inputs.{REFERENCE}")
            pairs = zip(result, reference.prepare_inputs(*args), strict=True)
            return max((got != expected).float().mean().item() for got, expected in pairs)

        return Case(rows * count * (4 + 3 * 8), 0, bind, wrong_share, 0.0, {})

    def _block_copy(self, page: int) -> Case:
        sizes = self._sizes
        keys, values = self._caches(page)
        blocks = torch.randperm(len(keys), device=self._device)[: 2 * sizes.copied]
        sources, targets = blocks.chunk(2)

        def bind(module: Any) -> Call:
            keys[targets] = 0
            values[targets] = 0
            return partial(module.block_copy, keys, values, sources, targets)

        def wrong_share(_: object) -> float:
            return max((x[targets] != x[sources]).float().mean().item() for x in (keys, values))

        return Case(2 * sizes.copied * page * sizes.token_bytes, 0, bind, wrong_share, 0.0, {})

    # ---- tensors

    def _caches(self, page: int) -> tuple[Tensor, Tensor]:
        """The pool as pages: `[N, page, Hkv, D]`, twice."""
        used = len(self._keys) // page * page
        keys, values = (pool[:used].unflatten(0, (-1, page)) for pool in (self._keys, self._values))
        return keys, values

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)


def _decode_name(rows: int, length: int, page: int) -> str:
    return f"decode B={rows} L={length} page={page}"


def _prefill_name(rows: int, count: int, context: int, page: int) -> str:
    return f"prefill {rows}×{count}{f' on {context}' if context else ''} page={page}"


def cache_call(call: Call) -> Call:
    """The call, made once and only when its result is needed."""
    return cache(call)


def _relative_error(result: Tensor, expected: Call) -> float:
    right = expected().float()
    return ((result.float() - right).norm() / right.norm()).item()


@dataclass(frozen=True, slots=True)
class Sampler:
    """One way to sample, and what torch's own operations make of it.

    Attributes:
        temperature: 0 means greedy.
        top_k: 0 means off.
        top_p: 1.0 means off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits: Tensor) -> Tensor:
        """Draws without waiting for the device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.top_k:
            best, ids = logits.float().topk(self.top_k)
            return ids.gather(1, self._race(best)[:, None])[:, 0]
        if self.top_p < 1:
            ordered, ids = logits.float().sort(descending=True)
            ordered = ordered.masked_fill(~self._is_kept(ordered), -torch.inf)
            return ids.gather(1, self._race(ordered)[:, None])[:, 0]
        return self._race(logits.float())

    def least(self, logits: Tensor) -> Tensor:
        """`[rows]`: no logit below may be drawn, but for rounding."""
        if self.temperature == 0:
            return logits.max(-1).values.float()
        if self.top_k:
            return logits.float().topk(self.top_k).values[:, -1]
        if self.top_p < 1:
            ordered = logits.float().sort(descending=True).values
            # One step of bf16 at these magnitudes: sums in another order may keep one value more.
            return ordered.masked_fill(~self._is_kept(ordered), torch.inf).min(-1).values - 0.07
        return torch.full(logits.shape[:1], -torch.inf, device=logits.device)

    def _is_kept(self, ordered: Tensor) -> Tensor:
        shares = ordered.softmax(-1)
        return shares.cumsum(-1) - shares < self.top_p

    @staticmethod
    def _race(scores: Tensor) -> Tensor:
        return (scores.softmax(-1) / torch.empty_like(scores).exponential_()).argmax(-1)


SAMPLERS = {
    "greedy": Sampler(temperature=0.0),
    "top-k 50": Sampler(top_k=50),
    "top-p 0.9": Sampler(top_p=0.9),
    "unfiltered": Sampler(),
}


class DenseAttention:
    """The same attention over keys and values in one piece, through torch.

    Args:
        query: `[rows, count, Hq, D]`.
        key: `[rows, length, Hkv, D]`.
        value: `[rows, length, Hkv, D]`.
        context: Tokens before the first query token.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, context: int) -> None:
        self._query, self._key, self._value = (x.transpose(1, 2) for x in (query, key, value))
        self._context = context
        self._count = query.shape[1]
        if self._count == 1:
            # A group's query heads become queries of one head: keys are then read once.
            grouped = self._query.reshape(len(query), key.shape[2], -1, key.shape[3])
            self._attend = partial(F.scaled_dot_product_attention, grouped, self._key, self._value)
        else:
            groups = query.shape[2] // key.shape[2]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (self._key, self._value))
            self._attend = partial(F.scaled_dot_product_attention, self._query, key, value)

    def sdpa(self) -> Tensor:
        """Scaled dot product attention: `[rows * count, Hq, D]`."""
        if self._count == 1:
            return self._attend().flatten(1, 2)
        if not self._context:
            return _packed(self._attend(is_causal=True))
        from torch.nn.attention.bias import causal_lower_right

        bias: Any = causal_lower_right(self._count, self._context + self._count)
        return _packed(self._attend(attn_mask=bias))

    def peers(self) -> dict[str, Call]:
        """Torch's attention by backend; a backend that cannot do it raises when it is called."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def with_backend(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return self.sdpa()

        backends = {"sdpa flash": SDPBackend.FLASH_ATTENTION}
        # The bias of a chunk is known to the flash backend only.
        if self._count == 1 or not self._context:
            backends["sdpa cudnn"] = SDPBackend.CUDNN_ATTENTION
        return {name: partial(with_backend, backend) for name, backend in backends.items()}

    def flex(self, device: torch.device) -> Call:
        """FlexAttention, compiled on a GPU; everything that can fail happens in the call."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        context, count = self._context, self._count

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + context >= key

        @cache
        def prepared() -> tuple[Callable[..., Any], Any]:
            attend = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
            if count == 1:
                return attend, None
            return attend, create_block_mask(sees, None, None, count, context + count, device=str(device))

        def call() -> Any:
            attend, mask = prepared()
            return attend(self._query, self._key, self._value, block_mask=mask, enable_gqa=True)

        return call


def _packed(attended: Tensor) -> Tensor:
    """`[rows, H, count, D]` -> `[rows * count, H, D]`."""
    return attended.transpose(1, 2).flatten(0, 1)

"""``sonar-repro fit MODEL``: one question, one answer. Exit 0: fits on an asked card; 3: on none; 2: a mistake."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config.schema import Config, GpuConfig, conf_dir
from ..errors import UserError
from ..forecast import fit as engine
from ..forecast.fit import Fit, OnCard

SCHEMA = "sonar_repro.fit/1"
FITS, FITS_NOWHERE = 0, 3

EXAMPLES = """examples:
  sonar-repro fit olmoe                                            every card, standard AdamW
  sonar-repro fit qwen3_30b_a3b --gpu h200 --method sonar --optimizer adamw8bit --solve batch
  sonar-repro fit olmoe --gpu rtx_4090,a100_80 --batch 4 --length 4096 --explain
  sonar-repro fit ./my_model/config.json --budget-gb 40            a model and a budget of your own
  sonar-repro fit granite --gpu rtx_5090 --price rtx_5090=0.69     dollars per million tokens
  sonar-repro fit olmoe --gpu l40s --parallel fsdp2 --solve gpus --json"""


def parser() -> argparse.ArgumentParser:
    """The options; each maps to one setting of an arm."""
    new = argparse.ArgumentParser(
        prog="sonar-repro fit",
        description="Does full fine-tuning of MODEL fit, how fast is a step, and where does the memory go. "
        "Forecast on fake tensors: no GPU, no weights. GB is 1e9 bytes. "
        "Exit 0: fits on an asked card; 3: on none; 2: a mistake.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = new.add_argument
    add("model", metavar="MODEL", help="a name of conf/model, a config.json or its folder, or a hub id in the cache")
    add("--gpu", help="cards, with commas between them (default: all of conf/gpu)")
    add("--budget-gb", type=float, help="a memory budget in place of cards, or beside --gpu")
    add("--method", default="standard_global_clip", help="(default: %(default)s)")
    add("--optimizer", default="adamw", help="(default: %(default)s)")
    add("--backend", default="grouped_mm", help="expert kernel (default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences per step and process (default: %(default)s)")
    add("--length", type=int, default=2048, help="tokens per sequence, all positions filled (default: %(default)s)")
    add("--accumulation", type=int, default=1, help="micro-batches per step (default: %(default)s)")
    add("--checkpointing", action="store_true", help="recompute each layer in backward")
    add("--gpus", type=int, default=1, help="processes, one card each (default: %(default)s)")
    add("--parallel", choices=("ddp", "fsdp2"), help="how they share the model (default with --gpus: fsdp2)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting of an arm, as in conf/")
    add("--solve", choices=("batch", "length", "gpus"), help="the largest batch or length, or the fewest GPUs")
    add(
        "--price",
        action="append",
        default=[],
        metavar="CARD=DOLLARS",
        help="per hour: gives dollars per million tokens",
    )
    add("--explain", action="store_true", help="the parts of the peak, and what would make it fit on each card")
    add("--json", action="store_true", help=f"machine-readable ({SCHEMA})")
    return new


def main(argv: Sequence[str]) -> int:
    """Answer one question."""
    options = parser().parse_args(argv)
    started = time.monotonic()
    question = Question(options)
    with Workers() as workers:
        workers.quiet = options.json
        found, solved = question.answer(workers)
        fits = [card for card in found.cards if card.fits]
        first = [] if not (options.explain or (options.gpu and not fits)) else question.first_remedies(found, workers)
    if options.json:
        print(
            json.dumps(as_json(question, found, solved, first, time.monotonic() - started), indent=1, allow_nan=False)
        )
    else:
        show(question, found, solved, first)
    return FITS if fits else FITS_NOWHERE


class Question:
    """The asked arm as overrides, the asked cards, and the prices. Raises UserError for what cannot be asked."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cards: list[GpuConfig] = []
        if options.budget_gb is not None:
            self.cards.append(engine.budget_card(options.budget_gb))
        if options.gpu or not self.cards:
            self.cards += engine.cards_named(options.gpu)
        self.prices = dict(_price(text, self.cards) for text in options.price)
        for name in ("batch", "length", "accumulation", "gpus"):
            if getattr(options, name) < (2 if name == "length" else 1):
                raise UserError(f"--{name} {getattr(options, name)}: must be at least {2 if name == 'length' else 1}")
        if options.solve == "gpus" and not options.parallel:
            options.parallel = "fsdp2"
        self.overrides = self._overrides()
        self.config = self.composed(self.overrides)
        self.limit = _length_limit(self.config)
        if self.limit and options.length > self.limit:
            raise UserError(
                f"--length {options.length}: the model takes at most {self.limit} (max_position_embeddings)"
            )

    def _overrides(self) -> list[str]:
        o = self.options
        named = [f"method={o.method}", f"optimizer={o.optimizer}", f"backend={o.backend}", f"batch_size={o.batch}"]
        named += [f"data.max_length={o.length}", model_override(o.model)]
        named += ["checkpointing=true"] if o.checkpointing else []
        named += [f"accumulation={o.accumulation}"] if o.accumulation > 1 else []
        if o.gpus > 1 or o.parallel:
            named += [f"parallel={o.parallel or 'fsdp2'}", f"parallel.processes={max(o.gpus, 1)}"]
        return [*named, *o.set]

    @staticmethod
    def composed(overrides: Sequence[str]) -> Config:
        """The arm, as ``python -m sonar_repro scale=forecast`` with the same settings would run it."""
        from .compose import compose

        return compose("scale=forecast", *overrides)

    def with_value(self, axis: str, value: int) -> list[str]:
        """The overrides with another batch, length or number of GPUs."""
        key = {"batch": "batch_size", "length": "data.max_length", "gpus": "parallel.processes"}[axis]
        return [*(o for o in self.overrides if o.split("=")[0] != key), f"{key}={value}"]

    def answer(self, workers: Workers) -> tuple[Fit, dict[str, Any] | None]:
        """The asked arm's forecast, or with --solve that of the value which was found."""
        axis = self.options.solve
        if axis is None:
            return workers.run(self.config, self.cards), None
        known: dict[int, Fit] = {}

        def fits(value: int) -> bool:
            workers.say(f"{axis} {value} …")
            known[value] = workers.run(self.composed(self.with_value(axis, value)), self.cards)
            return any(card.fits for card in known[value].cards)

        if axis == "gpus":
            best = engine.smallest(fits, 64)
        else:
            limit = (self.limit or 1 << 20) if axis == "length" else 4096
            best = engine.largest(fits, limit, start=min(128, limit) if axis == "length" else 1)
        tried = {value: any(card.fits for card in fit.cards) for value, fit in sorted(known.items())}
        order = [tried[value] for value in tried]
        monotone = order == sorted(order, reverse=axis != "gpus")
        solved = {"axis": axis, "value": best, "tried": tried, "monotone": monotone}
        shown = best if best is not None else (max(known) if axis == "gpus" else min(known))
        return known[shown], solved

    def first_remedies(self, found: Fit, workers: Workers) -> list[dict[str, Any]]:
        """For each card that it does not fit: the cheapest change in time that makes it fit, each a forecast."""
        waiting = [card.name for card in found.cards if not card.fits]
        result: list[dict[str, Any]] = []
        for words, overrides in engine.remedies(self.overrides, bool(found.breakdown.get("gradients, experts"))):
            if not waiting:
                break
            workers.say(f"{words} …")
            try:
                changed = workers.run(self.composed(overrides), self.cards)
            except UserError:
                continue  # a change that this arm cannot have
            for card in changed.cards:
                if card.name in waiting and card.fits:
                    waiting.remove(card.name)
                    result.append({"card": card.name, "change": words, **_times(card)})
        return result + [{"card": name, "change": None} for name in waiting]


def model_override(model: str) -> str:
    """The override that names the model: one of conf/model, a local file or folder, or a hub id in the cache."""
    names = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))
    if model in names:
        return f"model={model}"
    path = Path(model).expanduser()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(
                f"{model}: holds no config.json; give the folder of a transformers model or its config.json"
            )
        return f"model.config={_quoted(str(path))}"
    near = difflib.get_close_matches(model, names, n=1, cutoff=0.5)
    if "/" in model and not model.endswith(".json") and not model.startswith((".", "/", "~")):
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            raise UserError(f"{model}: its config.json is not in the hub's cache; say: hf download {model} config.json")
        return f"model.config={_quoted(model)}"
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"{model}: no such model{hint}; choose of {', '.join(names)}, or give a config.json or its folder")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _length_limit(config: Config) -> int | None:
    """The most positions that the model says it takes, read from its fields alone."""
    fields: dict[str, Any] = config.model.architecture
    if config.model.config:
        path = Path(config.model.config)
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            fields = json.loads(file.read_text(encoding="utf-8"))
    limit = fields.get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def _price(text: str, cards: list[GpuConfig]) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        dollars = float(value)
    except ValueError:
        dollars = -1.0
    if not 0 < dollars < 1e6:
        raise UserError(f"--price {text}: write CARD=DOLLARS per hour, as rtx_4090=0.35")
    if name not in {card.name for card in cards}:
        raise UserError(f"--price {text}: {name} is not an asked card; asked: {', '.join(c.name for c in cards)}")
    return name, dollars


class Workers:
    """Two forecasts at a time, each in a process of its own, behind the cache."""

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None
        self.quiet = False
        self._console = Console(stderr=True)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def say(self, text: str) -> None:
        """A line on a terminal's standard error while long work goes on."""
        if not self.quiet and self._console.is_terminal:
            self._console.print(text, style="dim")

    def run(self, config: Config, cards: list[GpuConfig]) -> Fit:
        """The answer for one arm, from the cache or from a forecast."""
        path = engine.cache_file(config, cards)
        kept = engine.read_cache(path)
        if kept is not None:
            return kept
        found = engine.from_plain(self._submit(config, cards).result())
        engine.write_cache(path, found)
        return found

    def _submit(self, config: Config, cards: list[GpuConfig]) -> Future[dict[str, Any]]:
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=8)
        return self.pool.submit(engine.work, dataclasses.asdict(config), [dataclasses.asdict(card) for card in cards])


# -- what is shown ---------------------------------------------------------------------------------------------------


def _times(card: OnCard) -> dict[str, Any]:
    return {"step_ms": card.step_ms, "tokens_per_s": card.tokens_per_s, "borderline": card.borderline}


def assumed(config: Config) -> str:
    """The set-up in one line: every answer begins with what it takes for granted."""
    parts = [
        config.model.name,
        f"method {config.method.name}",
        f"optimizer {config.optimizer.name}",
        config.backend.name,
    ]
    parts += [
        f"{config.scale.dtype} weights, gradients and states",
        f"batch {config.batch_size} × {config.data.max_length}",
    ]
    parts += [f"accumulation {config.accumulation}"] if config.accumulation > 1 else []
    parts.append("checkpointing" if config.checkpointing else "no checkpointing")
    parts += (
        [f"{config.parallel.name} on {config.parallel.processes}, one rank"] if config.parallel.name != "none" else []
    )
    return ", ".join(parts)


def as_json(question: Question, found: Fit, solved: Any, first: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The answer as plain data."""
    from .. import __version__

    cards = [{k: v for k, v in dataclasses.asdict(card).items()} for card in found.cards]
    for card in cards:
        card["dollars_per_million_tokens"] = dollars(question.prices.get(card["name"]), card["tokens_per_s"])
    memory = {
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "peak_when": found.peak_when,
        "breakdown": found.breakdown,
    }
    head = {"schema": SCHEMA, "version": __version__, "assumes": assumed(_shown_config(question, solved))}
    body = {"arm_id": found.arm_id, "arm": found.arm, "memory": memory, "cards": cards, "remedies": first}
    return {**head, **body, "solved": solved, "seconds": round(seconds, 3)}


def _shown_config(question: Question, solved: dict[str, Any] | None) -> Config:
    if solved is None or solved["value"] is None:
        return question.config
    return question.composed(question.with_value(solved["axis"], solved["value"]))


def dollars(per_hour: float | None, tokens_per_s: float | None) -> float | None:
    """Dollars per million tokens, or None where one is not known."""
    return None if per_hour is None or not tokens_per_s else round(per_hour / 3600 / tokens_per_s * 1e6, 4)


def show(question: Question, found: Fit, solved: dict[str, Any] | None, first: list[dict[str, Any]]) -> None:
    """One screen: the set-up, the solved value, the cards, what would help, and with --explain the parts."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    say = lambda text: console.print(text, soft_wrap=True, markup=False)  # noqa: E731
    say(assumed(_shown_config(question, solved)))
    peak = (
        f"peak {found.peak_allocated_bytes / 1e9:.2f} GB allocated, {found.peak_reserved_bytes / 1e9:.2f} GB reserved"
    )
    say(f"{peak} (1 GB = 1e9 bytes), at: {found.peak_when}")
    if solved is not None:
        word = {"batch": "largest batch", "length": "longest length", "gpus": "fewest GPUs"}[solved["axis"]]
        value = "none" if solved["value"] is None else str(solved["value"])
        say(f"{word} that fits: {value}" + ("" if solved["monotone"] else " (memory is not monotone here; see --json)"))
    console.print(_card_table(question, found))
    for remedy in first:
        step = f", {remedy['step_ms']:.0f} ms per step" if remedy.get("step_ms") else ""
        what = f"would fit with {remedy['change']}{step}" if remedy["change"] else "nothing tried here makes it fit"
        say(f"{remedy['card']}: {what}")
    if question.options.explain:
        console.print(_part_table(found))


def _card_table(question: Question, found: Fit) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("card")
    table.add_column("fits")
    headings = ["margin GB", "ms per step", "tokens per s"] + (["$ per M tokens"] if question.prices else [])
    for heading in headings:
        table.add_column(heading, justify="right")
    for card in sorted(found.cards, key=lambda card: card.usable_bytes):
        verdict = ("yes" if card.fits else "no") + (", borderline" if card.borderline else "")
        timed = [_cell(card.step_ms, ".0f"), _cell(card.tokens_per_s, ",.0f")] if card.fits else ["–", "–"]
        cells = [card.name, verdict, f"{card.margin_bytes / 1e9:+.1f}", *timed]
        if question.prices:
            cells.append(_cell(dollars(question.prices.get(card.name), card.tokens_per_s), ".3f"))
        table.add_row(*cells)
    return table


def _part_table(found: Fit) -> Table:
    table = Table(box=None, pad_edge=False, title="at the peak", title_justify="left")
    table.add_column("part")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for part, size in found.breakdown.items():
        if size >= 500_000 or part == "fragmentation":
            table.add_row(part, f"{size / 1e9:.3f}", f"{size / found.peak_reserved_bytes:.1%}")
    table.add_row("reserved", f"{found.peak_reserved_bytes / 1e9:.3f}", "")
    return table


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)

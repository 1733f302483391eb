#!/usr/bin/env python
"""Opens damaged GGUF files by the thousand, as a program would, in one process that must survive all of them.

    python scripts/fuzz_gguf.py --count 1000 --out build/fuzz tiny-*.gguf

Every seed makes one damaged file (`scripts/fuzzing.py`). A worker opens them one after the other and
generates a few tokens from each. A worker that ends, stays silent too long, grows too large or meets an error
that is not a `LlamaspecError` is a fault: the file is kept in OUT, and another worker goes on.
OUT/results.jsonl holds what came of every seed; what it holds already is not tried again. The last line on
stdout is JSON. Exit code 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from fuzzing import damaged
from llamaspec import FixedLength, LlamaspecError, ModelOptions, open_pair

SILENT_SECONDS = 300.0  # of a worker, more than any trial of a small file may take
MAX_GROWTH = 1 << 30  # bytes of memory in the worker
FAULTS = ("crash", "hang", "traceback", "growth", "message")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("base", nargs="+", type=Path, help="sound files to damage")
    parser.add_argument("--count", type=int, default=1000, help="files to try")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no file after so long")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder of results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        work(args)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the worker ends, too
    begin = time.monotonic()
    while left(args) and time.monotonic() - begin < args.seconds:
        watch(args, args.seconds - (time.monotonic() - begin))
    return summarise(args, time.monotonic() - begin)


def results(folder: Path) -> list[dict[str, Any]]:
    """What is known of earlier seeds."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def left(args: argparse.Namespace) -> list[int]:
    """Seeds that have not been tried."""
    done = {result["seed"] for result in results(args.out)}
    return [seed for seed in range(args.first, args.first + args.count) if seed not in done]


def watch(args: argparse.Namespace, seconds: float) -> None:
    """Run one worker to its end, and say what it was doing if that came too soon."""
    state = args.out / "now.json"
    state.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--worker", "--out", str(args.out), "--first", str(args.first)]
    command += ["--count", str(args.count), "--seconds", str(seconds), *map(str, args.base)]
    with (args.out / "worker.log").open("ab") as log, subprocess.Popen(command, stderr=log) as worker:
        try:
            while worker.poll() is None:
                time.sleep(0.5)
                if state.exists() and time.time() - state.stat().st_mtime > SILENT_SECONDS:
                    worker.kill()
                    fault(args.out, "hang", f"silent for {SILENT_SECONDS:.0f} s")
                    return
        except BaseException:
            worker.kill()
            raise
    if worker.returncode != 0:
        fault(args.out, "crash", f"exit code {worker.returncode}")


def fault(folder: Path, outcome: str, detail: str) -> None:
    """Note what a lost worker was doing; its file stays."""
    now = json.loads((folder / "now.json").read_text())
    note(folder, {**now, "outcome": outcome, "detail": detail})


def note(folder: Path, result: dict[str, Any]) -> None:
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")
    if result["outcome"] in FAULTS:
        kept = folder / f"{result['outcome']}-{result['seed']}.gguf"
        (folder / "damaged.gguf").replace(kept)


def work(args: argparse.Namespace) -> None:
    """Try one file after the other in this process."""
    contents = [path.read_bytes() for path in args.base]
    begin = time.monotonic()
    for seed in left(args):
        if time.monotonic() - begin > args.seconds:
            break
        content, how = damaged(contents[seed % len(contents)], seed)
        path = args.out / "damaged.gguf"
        path.write_bytes(content)
        now = {"seed": seed, "base": args.base[seed % len(contents)].name, "how": how}
        state = args.out / "now.tmp"
        state.write_text(json.dumps(now))
        state.replace(args.out / "now.json")
        start, memory = time.monotonic(), peak_bytes()
        outcome, detail = open_one(path)
        if peak_bytes() - memory > MAX_GROWTH:
            outcome = "growth"
        note(args.out, {**now, "outcome": outcome, "detail": detail, "seconds": time.monotonic() - start})


def peak_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def open_one(path: Path) -> tuple[str, str]:
    """What came of opening and using a file: an outcome and, in one line, why."""
    options = ModelOptions(threads=1, gpu_layers=0)
    try:
        with open_pair(path, path, target_options=options, draft_options=options) as pair:
            pair.stream("def f(x):", seed=1, max_tokens=8, policy=FixedLength(2)).run()
    except LlamaspecError as error:
        message = str(error)
        if "\n" in message or "; " not in message:
            return "message", message
        told = re.sub(r"\d+", "N", message.replace(str(path), "FILE"))
        return type(error).__name__, told[:160]
    except Exception:  # noqa: BLE001 - whatever it is, it is a fault
        return "traceback", traceback.format_exc()
    return "works", ""


def summarise(args: argparse.Namespace, seconds: float) -> int:
    """Counts on stdout, the last line as JSON."""
    found = results(args.out)
    outcomes = Counter(result["outcome"] for result in found)
    told = Counter(f"{r['outcome']}: {(r['detail'].splitlines() or [''])[-1]}" for r in found)
    for detail, n in told.most_common(40):
        print(f"{n:6}  {detail[:150]}")
    faults = {kind: outcomes.get(kind, 0) for kind in FAULTS}
    rate = len(found) / sum(result.get("seconds", 0.0) for result in found) if found else 0.0
    summary = {"files": len(found), "outcomes": dict(outcomes), "faults": faults}
    print(json.dumps({**summary, "per_second": round(rate, 2), "seconds": round(seconds, 1)}))
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

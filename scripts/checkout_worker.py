"""Generates with another checkout of llamaspec, for scripts/checkout_arms.py. Uses the public API only.

Run as `python checkout_worker.py FOLDER TARGET DRAFT`. Each line of stdin is a request in JSON, each line of
stdout its answer; the checkout's own messages go to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Answer requests until stdin ends."""
    folder, target, draft = sys.argv[1:4]
    sys.path.insert(0, folder)
    import llamaspec

    cost_curve = sys.modules[llamaspec.AutoLength.__module__].CostCurve  # wherever that version keeps it
    answers, sys.stdout = sys.stdout, sys.stderr
    kept = llamaspec.AutoLength()
    with llamaspec.open_pair(target, draft) as pair:
        for line in sys.stdin:
            request = json.loads(line)
            curve = request["curve"]
            prior = cost_curve(tuple(curve[0]), tuple(curve[1]), curve[2]) if curve else None
            policies: dict[str, Any] = {
                "plain": llamaspec.FixedLength(0),
                "auto, cold": llamaspec.AutoLength(),
                "auto, kept": kept,
                "auto": llamaspec.AutoLength(prior),
            }
            pair.forget()
            completion = pair.stream(
                request["text"],
                sampling=llamaspec.Sampling(temperature=request["temperature"]),
                seed=request["seed"],
                max_tokens=request["max_tokens"],
                policy=policies[request["arm"]],
            ).run()
            answer = {"tokens": completion.tokens, "speed": completion.summary.tokens_per_second}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""What texts of earlier runs are worth as drafts, in a session of ten similar prompts: counts, no seconds.

    python scripts/similar_edits.py                       # the embedded target
    python scripts/similar_edits.py --target big.gguf -n 200

The same piece of code is continued ten times, each time under another name and with one line more. Every
number is greedy, with eight draft tokens at most, copied from earlier text or from earlier prompts' texts.
"""

from __future__ import annotations

from pathlib import Path

import click

from help_text import help_text
from llamaspec import FixedLength, Sampling, demo_target, open_pair
from llamaspec.drafters.ngram import PastTexts

NAMES = ("lines", "words", "items", "rows", "names", "values", "paths", "files", "keys", "parts")
CODE = '''
class Reader:
    """Read {name} from a file."""

    def __init__(self, path, encoding=None):
        self.path = path
        self.encoding = encoding
        self.{name} = []

    def read_{name}(self):
        """Return all {name}."""
        with open(self.path, encoding=self.encoding) as file:
            for line in file:
                self.{name}.append(line)
        return self.{name}

    def write_{name}(self, path):
'''


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, default=demo_target(), show_default="the embedded target")
@click.option("--max-tokens", "-n", type=int, default=128, show_default=True)
def main(target: Path, max_tokens: int) -> None:
    """Print tokens per round and accepted draft tokens, with and without earlier texts."""
    for past in (None, PastTexts()):
        n_rounds = n_tokens = n_accepted = 0
        with open_pair(target, ngram=True, past=past) as pair:
            for name in NAMES:
                stream = pair.stream(
                    CODE.format(name=name),
                    sampling=Sampling(temperature=0),
                    policy=FixedLength(8),
                    max_tokens=max_tokens,
                )
                summary = stream.run().summary
                n_rounds += summary.n_rounds
                n_tokens += summary.n_tokens
                n_accepted += summary.n_accepted
        click.echo(
            f"{'without' if past is None else 'with'} earlier texts: {n_tokens} tokens in {n_rounds} rounds, "
            f"{n_tokens / n_rounds:.2f} a round, {n_accepted} of them accepted draft tokens"
        )


if __name__ == "__main__":
    main()

"""Write the chat template of the embedded pair into its two files; their tensors stay as they are.

    python scripts/label_demo_pair.py                    # the files that ship with llamaspec
    python scripts/label_demo_pair.py --folder elsewhere

Training writes it by itself (`demo_pair/export.py`). The models continue text, so a conversation is for them
the messages one after the other, each on its own lines.
"""

from __future__ import annotations

from pathlib import Path

import click
import gguf

from demo_pair.chat_template import CHAT_TEMPLATE
from help_text import help_text
from llamaspec import demo_target


def relabel(path: Path, template: str) -> None:
    """Replace the chat template of a model file."""
    partial = path.with_suffix(".partial")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name in ("general.architecture", gguf.Keys.Tokenizer.CHAT_TEMPLATE):
            continue
        if not field.name.startswith("GGUF."):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()
    partial.replace(path)


@click.command(help=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--folder", type=Path, default=demo_target().parent, help="Where the two files are.")
def main(folder: Path) -> None:
    """Label both files."""
    for name in ("target.gguf", "draft.gguf"):
        relabel(folder / name, CHAT_TEMPLATE)
        print(folder / name)


if __name__ == "__main__":
    main()

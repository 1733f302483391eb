"""The chat template of the embedded pair, and how it is written into a finished model file.

The models only continue text, so a conversation is the messages, one after the other, each on its own lines.
"""

from __future__ import annotations

from pathlib import Path

import gguf

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '\\n' }}{% endfor %}"


def relabel(path: Path, template: str = CHAT_TEMPLATE) -> None:
    """Replace the chat template of a model file; its tensors stay as they are."""
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

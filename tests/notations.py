"""Chat templates whose notation of calls is not in `chat/families.py`, and calls in them."""

from __future__ import annotations

from llamaspec.chat.families import recognize
from llamaspec.chat.notation import AnswerFormat

JSON = "{{ c.function.arguments | tojson }}"
NAME = "{{ c.function.name }}"
VALUE = "{{ v if v is string else v | tojson }}"


def template(begin: str, call: str, between: str, end: str) -> str:
    """Return a template that writes calls so."""
    calls = f"{{% for c in m.tool_calls %}}{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}"
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        f"{{% if m.tool_calls %}}{begin}{calls}{end}{{% endif %}}<|end|>{{% endfor %}}<|assistant|>"
    )


def pairs(before: str, between: str, after: str, separator: str = "") -> str:
    """Return the part of a template that writes arguments as pairs."""
    comma = f"{{% if not loop.last %}}{separator}{{% endif %}}" if separator else ""
    pair = f"{before}{{{{ k }}}}{between}{after}{comma}"
    return f"{{% for k, v in c.function.arguments | items %}}{pair}{{% endfor %}}"


DSML_VALUE = f"""string="{{{{ 'true' if v is string else 'false' }}}}">{VALUE}"""
TEMPLATES = {
    "glm": template(
        "",
        f"<tool_call>{NAME}{{{{ '\\n' }}}}"
        + pairs("<arg_key>", f"</arg_key>{{{{ '\\n' }}}}<arg_value>{VALUE}", "</arg_value>{{ '\\n' }}")
        + "</tool_call>",
        "",
        "",
    ),
    "kimi": template(
        "<|calls_begin|>",
        f"<|call_begin|>{{{{ c.id }}}}<|argument_begin|>{JSON}<|call_end|>",
        "",
        "<|calls_end|>",
    ),
    "deepseek": template(
        "<｜calls▁begin｜>",
        f"<｜call▁begin｜>{NAME}<｜sep｜>{{{{ c.function.arguments + '' }}}}<｜call▁end｜>",
        "{{ '\\n' }}",
        "<｜calls▁end｜>",
    ),
    "dsml": template(
        "<｜DSML｜calls>",
        f'<｜DSML｜invoke name="{NAME}">'
        + pairs('<｜DSML｜parameter name="', f'" {DSML_VALUE}', "</｜DSML｜parameter>")
        + "</｜DSML｜invoke>",
        "",
        "</｜DSML｜calls>",
    ),
    "lfm2": template(
        "<|call_start|>[", f"{NAME}({pairs('', '={{ v | tojson }}', '', ', ')})", ", ", "]<|call_end|>"
    ),
    "pythonic": template("[", f"{NAME}({pairs('', '={{ v | tojson }}', '', ', ')})", ", ", "]"),
    "minimax": template(
        "<m:call>{{ '\\n' }}",
        f'<invoke name="{NAME}">{{{{ "\\n" }}}}'
        + pairs('<parameter name="', f'">{VALUE}', '</parameter>{{ "\\n" }}')
        + '</invoke>{{ "\\n" }}',
        "",
        "</m:call>",
    ),
    "command-r": template(
        "<|ACTION|>[",
        f'{{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{NAME}", "parameters": {JSON}}}',
        ", ",
        "]<|END_ACTION|>",
    ),
    "nemotron": template("<TOOLCALL>[", f'{{"name": "{NAME}", "arguments": {JSON}}}', ", ", "]</TOOLCALL>"),
}
DERIVED: dict[str, AnswerFormat] = {name: recognize(source) for name, source in TEMPLATES.items()}

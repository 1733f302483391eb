"""Templates are programs of strangers: the worst that they can cause is an error of one line."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from command import Answer, python
from llamaspec.chat import sandbox
from llamaspec.chat.sandbox import PROCESS, RenderError, TemplateProcess
from patience import PATIENCE

DOUBLING = "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
BRANCHING = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "long output": "{% set x = 'A' * 1000000 %}{% for i in range(17) %}{{ x }}{% endfor %}",
    "product": "{{ 'A' * 3000000000 }}",
    "padding": "{{ 'A'.ljust(30000000000) }}",
    "format": "{{ '%3000000000d' % 1 }}",
    "method format": "{{ '{:3000000000}'.format(1) }}",
    "filter": "{{ 'A' | center(30000000000) }}",
    "indented JSON": "{{ [1] | tojson(indent=3000000000) }}",
    "date": "{{ strftime_now('%999999999d' * 99) }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "doubling": DOUBLING,
    "branching": BRANCHING,
    "lorem ipsum": "{{ lipsum(n=100000000) }}",
    "regular expression": "{{ ('a@' * 40000) | urlize }}{{ ('<' * 200000) | striptags }}" * 40,
    "error": "{{ raise_exception('no' * 100000000) }}",
    "self": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "ifs": 500 * "{% if true %}" + 500 * "{% endif %}",
    "many ifs": 20000 * "{% if true %}" + 20000 * "{% endif %}",
    "brackets": "{{ " + 100000 * "(" + "1" + 100000 * ")" + " }}",
    "minus": "{{ " + 100000 * "-" + "1 }}",
    "sums": "{{ 1" + 100000 * " + 1" + " }}",
    "list in itself": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}"
    "{% endfor %}{{ n.x }}",
    "include": "{% include 'x' %}{% import 'y' as z %}",
}  # fmt: skip


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(cpu_seconds=0.5)
    yield process
    process.close()


def outcome(process: TemplateProcess, source: str) -> str:
    """Return the rendered text, or the reason of the failure."""
    try:
        return process.render(source, {})
    except RenderError as refused:
        return str(refused)[:501]


FAULTS = {
    "loops": "runs for more than 0.5 seconds",
    "branching": "runs for more than 0.5 seconds",
    "long output": "writes more than 16777216 characters",
    "product": "needs too much memory",
    "self": "recurses without end",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(process: TemplateProcess, name: str) -> None:
    """They hung, took gigabytes, or gave a traceback. The next template is rendered as usual."""
    found = outcome(process, HOSTILE[name])
    assert len(found) <= sandbox.MAX_CHARACTERS
    assert FAULTS.get(name, "") in found
    assert process.render("{{ x }}", {"x": "hello"}) == "hello"


@pytest.mark.parametrize(
    "wanted",
    ["os.environ['HF_TOKEN']", "__builtins__.open('/etc/passwd').read()", "os.listdir('/')", "os.pipe()"],
)
def test_a_template_that_breaks_out_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Jinja's sandbox had holes: with 3.1.5, a template in a model file could read the environment."""
    code = Path(sandbox.__file__).read_text()
    assert "import ImmutableSandboxedEnvironment" in code
    broken = tmp_path / "sandbox.py"
    broken.write_text(code.replace("jinja2.sandbox import ", "jinja2 import Environment as "))
    monkeypatch.setattr(sandbox, "__file__", str(broken))
    monkeypatch.setenv("HF_TOKEN", "secret")
    process, outside = TemplateProcess(), "{{ cycler.__init__.__globals__."
    try:
        assert "/" in process.render(outside + "os.getcwd() }}", {})  # it is outside of the sandbox
        with suppress(RenderError):
            assert process.render(outside + wanted + " }}", {}) == ""  # Jinja's word for what does not exist
    finally:
        process.close()


def test_a_template_that_breaks_out_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it could open a file."""
    code = Path(sandbox.__file__).read_text()
    broken, written = tmp_path / "sandbox.py", tmp_path / "written"
    code = code.replace("jinja2.sandbox import ", "jinja2 import Environment as ")
    broken.write_text(code.replace("resource.RLIMIT_NOFILE, (3, 3)", "resource.RLIMIT_NOFILE, (9, 9)"))
    monkeypatch.setattr(sandbox, "__file__", str(broken))
    process, outside = TemplateProcess(), "{{ cycler.__init__.__globals__.__builtins__"
    try:
        with suppress(RenderError):
            process.render(f"{outside}.open('{written}', 'w', 1).write('x\n') }}}}", {})
    finally:
        process.close()
    assert written.read_text() == ""


def test_ctrl_c_while_a_template_computes() -> None:
    """The next request does not get the answer to the interrupted one."""
    script = (
        "import signal, threading, os\n"
        "from llamaspec.chat.sandbox import TemplateProcess\n"
        "process = TemplateProcess(); process.check('')\n"
        "interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))\n"
        f"try: interrupt.start(); process.render({HOSTILE['loops']!r}, {{}})\n"
        "except KeyboardInterrupt: print(process.render('{{ x }}', {'x': 'next'}))\n"
    )
    assert python(script) == Answer(0, "next\n", "")


def working() -> tuple[TemplateProcess, psutil.Process]:
    """Yield a template process that was used, and the process that it started."""
    before = set(psutil.Process().children())
    process = TemplateProcess()
    assert process.render("{{ x }}", {"x": "1"}) == "1"
    (started,) = set(psutil.Process().children()) - before
    return process, started


def test_a_killed_process_is_started_again() -> None:
    process, started = working()
    started.kill()
    started.wait(PATIENCE)
    assert process.render("{{ x }}", {"x": "2"}) == "2"
    process.close()
    process.close()


def test_a_fork_has_its_own_process() -> None:
    process, started = working()
    child = os.fork()
    if child == 0:
        try:
            mine = process.render("{{ x }}", {"x": "y"}) == "y" and len(psutil.Process().children()) == 1
            process.close()
        finally:
            os._exit(0 if mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.render("{{ x }}", {"x": "z"}) == "z"
    assert started.is_running()
    process.close()


def test_several_threads() -> None:
    found: dict[int, str] = {}

    def render(i: int) -> None:
        found[i] = PROCESS.render("{{ x }}", {"x": str(i)})

    threads = [threading.Thread(target=render, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(8)}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ x | tojson }}", {"text": '{"b": "<é>", "a": [1, null]}'}),  # nothing is escaped for HTML
        ("{{ x | tojson(sort_keys=true, indent=1) }}",
         {"text": '{\n "a": [\n  1,\n  null\n ],\n "b": "<é>"\n}'}),
        ("{{ x | tojson(ensure_ascii=true, separators=(',', ':')) }}",
         {"text": '{"b":"<\\u00e9>","a":[1,null]}'}),
        ("a{% generation %}{{ x.b }}{% endgeneration %}z", {"text": "a<é>z"}),
        ("  {% if true %}\n  b\n{% endif %}\n", {"text": "  b\n"}),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
         {"text": "13"}),
        ("{{ strftime_now('%%') }}", {"text": "%"}),
        ("{{ raise_exception('No\nsystem  role.') }}", {"failure": "No system role"}),
        ("{{ raise_exception() }}", {"failure": "it gives no reason"}),
        ("{{ raise_exception(x.a, 1) }}", {"failure": "[1, None]"}),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {"failure": "it recurses without end"}),
        ("{{ 1 / 0 }}", {"failure": "division by zero"}),
        ("{{ x.__class__.__mro__ }}",
         {"failure": "access to attribute '__class__' of 'dict' object is unsafe"}),
    ],
)  # fmt: skip
def test_the_environment_of_templates(source: str, said: dict[str, str]) -> None:
    request = {"source": source, "variables": {"x": {"b": "<é>", "a": [1, None]}}}
    assert sandbox.respond(request) == said
    assert sandbox.respond({"source": source}) == {"text": ""}, "only compiled"

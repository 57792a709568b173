import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_core.environments.tools import function
from sao_core.tool_calls import MalformedToolCall, ToolCall, parse_tool_calls, without_thinking, write_tool_calls

ONE, TWO = ToolCall("python", {"code": "print(1)"}), ToolCall("look", {"path": "a/b", "lines": [1, 2]})
TOOLS = (function("python", "Runs code.", code="Python.", quiet={"type": "boolean"}, times={"type": "integer"}),)

FORMATS = {
    "hermes": '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>',
    "hermes_unclosed": '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}',
    "hermes_list": '<tool_call>[{"name": "python", "arguments": {"code": "print(1)"}}]</tool_call>',
    "openai": '<tool_call>{"type": "function", "function": {"name": "python", '
    '"arguments": "{\\"code\\": \\"print(1)\\"}"}}',
    "qwen_coder": "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)\n</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "python", "parameters": {"code": "print(1)"}}',
    "llama_tag": '<|python_tag|>{"name": "python", "parameters": {"code": "print(1)"}}',
    "mistral": '[TOOL_CALLS] [{"name": "python", "arguments": {"code": "print(1)"}, "id": "a1b2c3d4e"}]',
    "mistral_args": '[TOOL_CALLS]python[ARGS]{"code": "print(1)"}',
    "mistral_call_id": '[TOOL_CALLS]python[CALL_ID]a1b2c3d4e[ARGS]{"code": "print(1)"}',
    "phi": '<|tool_call|>[{"name": "python", "arguments": {"code": "print(1)"}}]<|/tool_call|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python\n```json\n"
    '{"code": "print(1)"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>"
    '{"code": "print(1)"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}


@pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS)
def test_each_format_is_read(written: str) -> None:
    assert parse_tool_calls(written) == ("", (ONE,))


@pytest.mark.parametrize("written", [FORMATS[name] for name in ("mistral", "mistral_call_id")])
def test_what_the_model_called_its_call_is_kept(written: str) -> None:
    assert parse_tool_calls(written)[1][0].call_id == "a1b2c3d4e"


def test_calls_come_in_order_and_the_text_around_them_without_them() -> None:
    text = f"First. {write_tool_calls([ONE])} Then: {write_tool_calls([TWO])}\n"
    assert parse_tool_calls(text) == ("First.  Then:", (ONE, TWO))
    assert parse_tool_calls(
        '{"name": "python", "parameters": {"code": "print(1)"}}; {"name": "f", "parameters": {}}'
    ) == (
        "",
        (ONE, ToolCall("f", {})),
    )


@pytest.mark.parametrize("text", ["", " 3 ", '{"answer": 3}', '{"name": "Ada"}', "a <tool> call", "f(x) = [1, 2]"])
def test_a_text_without_calls_comes_back_as_it_is(text: str) -> None:
    assert parse_tool_calls(text) == (text, ())


def test_calls_that_are_only_thought_of_are_no_calls() -> None:
    call = write_tool_calls([ONE])
    for thinking in ("<think>\nmaybe <tool_call>?\n</think>", f"maybe {call}</think>", f"<think>{call}</think>"):
        assert parse_tool_calls(f"{thinking}\n\n{write_tool_calls([TWO])}") == (thinking, (TWO,))
        assert without_thinking(f"{thinking}3") == "3"
    assert parse_tool_calls(f"<think>never done {call}") == (f"<think>never done {call}", ())
    assert without_thinking("<think>never done") == ""


def test_marks_within_an_argument_end_nothing() -> None:
    for marks in ("</tool_call>", "</think>", "<think>", "[TOOL_CALLS]", "<tool_call>"):
        call = ToolCall("python", {"code": f"print('{marks}')"})
        assert parse_tool_calls(write_tool_calls([call])) == ("", (call,))
        llama = json.dumps({"name": "python", "parameters": call.arguments})
        assert parse_tool_calls(llama) == ("", (call,))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=12), lambda inner: st.lists(inner, max_size=3)
        ),
        max_size=3,
    ),
    st.text("abc \n<>{}\"'\\é😀", max_size=10),
)
def test_what_is_written_is_read(arguments: dict[str, object], text: str) -> None:
    call = ToolCall("look", arguments)
    assert parse_tool_calls(write_tool_calls([call, ONE], text)) == (text.strip(), (call, ONE))


def test_the_schema_tells_the_types_that_xml_does_not() -> None:
    def read(name: str, value: str, known: bool = True) -> object:
        text = f"<tool_call><function=python><parameter={name}>{value}</parameter></function></tool_call>"
        return parse_tool_calls(text, TOOLS if known else ())[1][0].arguments[name]

    assert read("code", "1") == "1"
    assert (read("times", "1"), read("quiet", "True"), read("times", "one")) == (1, True, "one")
    assert (read("code", "1", known=False), read("code", "x = 1", known=False)) == (1, "x = 1")


MALFORMED = {
    "no json": ("<tool_call>\nprint(1)\n</tool_call>", "not valid JSON"),
    "cut": ('<tool_call>{"name": "python", "arguments": {"code": "pri', "Unterminated string"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '"name": FUNCTION'),
    "name of another type": ('<tool_call>{"name": 3}</tool_call>', '"name": FUNCTION'),
    "a number": ("<tool_call>3</tool_call>", '"name": FUNCTION'),
    "list of arguments": (
        '<tool_call>{"name": "python", "arguments": [1]}</tool_call>',
        "must be a JSON object: got list",
    ),
    "text as arguments": (
        '<tool_call>{"name": "python", "arguments": "1+1"}</tool_call>',
        "must be a JSON object: got str",
    ),
    "more after the object": (
        '<tool_call>{"name": "f", "arguments": {}} and so on</tool_call>',
        "must end with </tool_call>",
    ),
    "xml without end": ("<tool_call><function=python><parameter=code>1</parameter>", "must end with </function>"),
    "xml with text": ("<tool_call><function=python>print(1)</function></tool_call>", "only <parameter"),
    "llama cut": ('{"name": "python", "parameters": {"code": 1', "not valid JSON"),
    "deepseek": ("<｜tool▁calls▁begin｜>python", "must begin with"),
    "not a number": ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON value"),
    "half a surrogate pair": ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
    "too deep": ("<tool_call>" + "[" * 100_000, "not valid JSON"),
    "too long a number": ('<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
}


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_is_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(MalformedToolCall) as error:
        parse_tool_calls(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": ',
    "<function=",
    "</function>",
    "[TOOL_CALLS]",
]
PIECES += ['"arguments": ', "<parameter=a>", "</parameter>", *"<>{}[]|/\"'\\n: ,1"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_whatever_a_policy_writes_is_read_or_refused(text: str) -> None:
    try:
        outside, calls = parse_tool_calls(text, TOOLS)
    except MalformedToolCall:
        return
    assert calls or outside == text

"""A small agent with a calculator, as somebody else would write it: plain Python and the `openai` client."""

import ast
import json
import operator
import os
import sys

from openai import APIStatusError, OpenAI

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def compute(node):
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](compute(node.left), compute(node.right))
    return ast.literal_eval(node)


def calculator(arguments):
    try:
        return str(compute(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {error}"


def solve(task, variables):
    """Ask, run the tools that are called, and ask again, until there is an answer; returns what it was worth."""
    client = OpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"])
    messages = [{"role": "user", "content": task["question"]}]
    calls = turns = 0
    text = ""
    while turns < 3:
        try:
            completion = client.chat.completions.create(
                model=variables["OPENAI_MODEL"], messages=messages, tools=TOOLS, max_tokens=task.get("max_tokens", 200)
            )
        except APIStatusError as error:
            print(f"no more: {error.code}", file=sys.stderr)
            break
        turns += 1
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        text = message.content or ""
        if message.tool_calls:
            calls += len(message.tool_calls)
            for call in message.tool_calls:
                result = calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        elif completion.choices[0].finish_reason == "stop":
            break
        else:
            messages.append({"role": "user", "content": "go on"})
    right = float(task["answer"] in text.split())
    digits = sum(letter.isdigit() for letter in text) / max(len(text), 1)
    return {"reward": max(right, digits / 2), "parts": {"right": right, "calls": calls, "turns": turns}}


if __name__ == "__main__":
    with open(os.environ["SAO_TASK"]) as file:
        given = json.load(file)
    with open(os.environ["SAO_RESULT"], "w") as file:
        json.dump(solve(given, os.environ), file)

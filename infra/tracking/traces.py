"""Rollouts as MLflow traces: the conversation as spans, the reward as feedback.

A trace has the id that follows from its trajectory, so one that is sent again is the same trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.ledger import EvaluationRecord
from infra.tracking.client import Destination, milliseconds
from sao_core.protocols import Rollout
from sao_core.trajectory import Message, Role

MAX_TEXT = 20_000
"""Characters of a message that are shown."""

_PREVIEW = 1000
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class _Step:
    """A part of a rollout: a turn of the policy, or what the environment said to it."""

    name: str
    kind: str
    """MLflow's span type."""
    inputs: Any
    outputs: Any
    weight: float
    """Its share of the time."""
    context_tokens: int | None = None
    action_tokens: int | None = None


def send_trace(
    there: Destination, rollout: Rollout, rank: str, evaluation: EvaluationRecord, model_id: str | None
) -> str:
    """Send a rollout of an evaluation as a trace of the run; returns the trace's id."""
    from mlflow.tracing.client import TracingClient

    trace_id, spans, info = make_trace(there, rollout, rank, evaluation, model_id)
    tracing = TracingClient(there.tracking_uri)  # `MlflowClient` itself would make up an id
    tracing.start_trace(info)
    tracing.log_spans(there.experiment_id, spans)
    return trace_id


def make_trace(
    there: Destination, rollout: Rollout, rank: str, evaluation: EvaluationRecord, model_id: str | None
) -> tuple[str, list[Any], Any]:
    """The id, the spans and the description of a rollout's trace."""
    from mlflow.entities import AssessmentSource, Feedback, TraceInfo, TraceLocation, TraceState

    first = rollout[0]
    digest = hashlib.sha256(first.trajectory_id.encode()).hexdigest()
    trace_id = f"tr-{digest[:32]}"
    started = first.timings.get("started_at", evaluation.created_at)
    duration_s = first.timings.get("duration_s", 0.0)
    question, answer = _question(first.messages), _answer(first.messages)
    metadata = {"mlflow.sourceRun": there.run_id}
    if model_id is not None:
        metadata["mlflow.modelId"] = model_id
    reward = Feedback(
        name="reward",
        value=float(first.score),
        source=AssessmentSource("CODE", f"{first.environment} {first.environment_version}".strip() or "environment"),
        trace_id=trace_id,
        rationale=", ".join(f"{name} {value:g}" for name, value in sorted(first.reward_parts.items())) or None,
        create_time_ms=milliseconds(evaluation.created_at),
        last_update_time_ms=milliseconds(evaluation.created_at),
    )
    reward.assessment_id = f"a-{digest[:32]}"
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(there.experiment_id),
        request_time=milliseconds(started),
        state=TraceState.OK,
        request_preview=_cut(question, _PREVIEW),
        response_preview=_cut(answer, _PREVIEW),
        client_request_id=first.trajectory_id,
        execution_duration=milliseconds(duration_s),
        trace_metadata=metadata,
        tags={
            "mlflow.traceName": f"{rank} of step {evaluation.step}",
            "trajectory_id": first.trajectory_id,
            "rank": rank,
            "step": str(evaluation.step),
            "policy_version": str(evaluation.version),
            "difficulty": first.difficulty or "none",
            "outcome": str(first.outcome),
            "stop_reason": first.stop_reason,
        },
        assessments=[reward],
    )
    spans = list(_spans(trace_id, rollout, started, duration_s))
    return trace_id, spans, info


def _spans(trace_id: str, rollout: Rollout, started: float, duration_s: float) -> Iterator[Any]:
    """The rollout as the root, its steps below it, one after the other.

    A rollout records when it began, how long it took, and how much of that was generation. The policy's turns share
    the latter by their tokens; what the environment said shares the rest.
    """
    first = rollout[0]
    steps = _steps(rollout)
    root = _span_id(trace_id, 0)
    attributes = {"reward": float(first.score), "reward_parts": dict(first.reward_parts), "outcome": str(first.outcome)}
    yield _span(
        trace_id,
        root,
        None,
        "rollout",
        "AGENT",
        (started, started + duration_s),
        {"messages": _shown(_opening(first.messages))},
        {"messages": _shown(first.messages[-1:]), "reward": float(first.score), "outcome": str(first.outcome)},
        attributes,
    )
    total = sum(step.weight for step in steps) or 1.0
    at = started
    for index, step in enumerate(steps, 1):
        until = at + duration_s * step.weight / total
        more: dict[str, Any] = {}
        if step.action_tokens is not None and step.context_tokens is not None:
            more["mlflow.chat.tokenUsage"] = {
                "input_tokens": step.context_tokens,
                "output_tokens": step.action_tokens,
                "total_tokens": step.context_tokens + step.action_tokens,
            }
        span_id = _span_id(trace_id, index)
        yield _span(trace_id, span_id, root, step.name, step.kind, (at, until), step.inputs, step.outputs, more)
        at = until


def _steps(rollout: Rollout) -> list[_Step]:
    """Turns of the policy, each with the messages since its last one, and the observations between them."""
    first = rollout[0]
    spoken = [turn for segment in rollout for turn in segment.turns if turn.role is Role.ASSISTANT]
    actions = sum(turn.stop - turn.start for turn in spoken) or 1
    generation_s = first.timings.get("generation_s", 0.0)
    observations = sum(message.role is not Role.ASSISTANT for message in _after_opening(first.messages)) or 1
    observation_s = max(first.timings.get("duration_s", 0.0) - generation_s, 0.0) / observations
    steps: list[_Step] = []
    new: list[Message] = list(_opening(first.messages))
    turns = iter(spoken)
    number = 0
    for message in _after_opening(first.messages):
        if message.role is Role.ASSISTANT:
            number += 1
            turn = next(turns, None)
            tokens = 0 if turn is None else turn.stop - turn.start
            steps.append(
                _Step(
                    f"turn {number}",
                    "LLM",
                    {"messages": _shown(new)},
                    {"choices": [{"index": 0, "message": _shown([message])[0]}]},
                    generation_s * tokens / actions,
                    None if turn is None else turn.start,
                    None if turn is None else tokens,
                )
            )
            new = []
        else:
            said = steps[-1].outputs["choices"][0]["message"] if steps and steps[-1].kind == "LLM" else None
            asked = {"action": said["content"]} if said else {}
            steps.append(_Step(f"{message.role} {number}", "TOOL", asked, _cut(message.content), observation_s))
            new.append(message)
    return steps


def _span(
    trace_id: str,
    span_id: str,
    parent: str | None,
    name: str,
    kind: str,
    time_s: tuple[float, float],
    inputs: Any,
    outputs: Any,
    more: Mapping[str, Any],
) -> Any:
    from mlflow.entities import Span

    attributes = {
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
        **more,
    }
    return Span.from_dict(
        {
            "trace_id": trace_id,
            "span_id": span_id,
            "parent_span_id": parent,
            "name": name,
            "start_time_unix_nano": round(time_s[0] * _NANOSECONDS),
            "end_time_unix_nano": round(time_s[1] * _NANOSECONDS),
            "attributes": {key: json.dumps(value) for key, value in attributes.items()},
            "status": {"code": "STATUS_CODE_OK", "message": ""},
        }
    )


def _span_id(trace_id: str, index: int) -> str:
    return hashlib.sha256(f"{trace_id}/{index}".encode()).hexdigest()[:16]


def _opening(messages: Sequence[Message]) -> Sequence[Message]:
    """What was said before the policy first spoke."""
    return messages[: _first_turn(messages)]


def _after_opening(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[_first_turn(messages) :]


def _first_turn(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message.role is Role.ASSISTANT), len(messages))


def _question(messages: Sequence[Message]) -> str:
    opening = _opening(messages)
    return opening[-1].content if opening else ""


def _answer(messages: Sequence[Message]) -> str:
    spoken = [message.content for message in messages if message.role is Role.ASSISTANT]
    return spoken[-1] if spoken else ""


def _shown(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat interfaces take them, long ones cut."""
    return [{"role": str(message.role), "content": _cut(message.content)} for message in messages]


def _cut(text: str, length: int = MAX_TEXT) -> str:
    text = text.replace("\0", "␀")  # Postgres takes no other
    return text if len(text) <= length else f"{text[:length]}… [{len(text) - length:,} more characters]"

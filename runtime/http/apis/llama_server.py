"""llama-server's own API: /completion, /apply-template, /props and /slots; /tokenize is in
`app.py`, together with vLLM's. From llama.cpp's reference (tools/server/README.md)."""

from typing import Any

from fastapi import FastAPI, Request, Response

from dovetail.protocol.messages import PromptRead, Result
from dovetail.runtime.http.apis.documents import documented
from dovetail.runtime.http.apis.translation import as_body, unsupported
from dovetail.runtime.http.apis.writers import BlockWriter, prompt_progress, sse
from dovetail.runtime.http.bodies import ChatBody, CompletionBody
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.events import Change
from dovetail.runtime.http.orders import Order
from dovetail.runtime.http.service import Service, json_response

STOPS = {"length": "limit", "stop": "eos"}
ALL = -1  # tokens of a reply without n_predict: as many as fit
Object = dict[str, Any]


def timings(result: Result) -> Object:
    """Return the figures of a reply under llama-server's names."""
    read = result.prompt_tokens - result.reused_tokens
    decoding_s = max(0.0, result.wall_s - result.time_to_first_token_s)
    return {
        "cache_n": result.reused_tokens,
        **_rates("prompt", read, result.prefill_s),
        **_rates("predicted", result.completion_tokens, decoding_s),
        "draft_n": result.drafted_tokens,
        "draft_n_accepted": result.accepted_tokens,
    }


def _rates(name: str, tokens: int, seconds: float) -> Object:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


class LlamaWriter(BlockWriter):
    """Writes a reply of /completion."""

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return sse(error.body)

    def progress(self, read: PromptRead, index: int, since_s: float) -> str:
        """Return an event without text, if progress is requested."""
        if not self._order.progress:
            return ""
        return sse({**self._piece(""), **prompt_progress(read, since_s)}).decode()

    def whole(self) -> Object:
        """Return the reply in one piece."""
        return self._last("".join(block.text for block in self._blocks.all))

    def _change(self, change: Change) -> str:
        return sse(self._piece(change.text)).decode() if change.what == "more" else ""

    def _piece(self, content: str) -> Object:
        """Return an event of a reply that goes on."""
        tokens = {
            "tokens_predicted": self.replies[0].completion_tokens,
            "tokens_evaluated": self._prompts()[0],
        }
        own = {"index": 0, "content": content, "tokens": [], "stop": False, "id_slot": -1}
        return {**own, **tokens}

    def _ended(self) -> str:
        return sse(self._last("")).decode()

    def _last(self, content: str) -> Object:
        result, stop = self._result, self.replies[0].stop
        submit = self._order.submits[0]
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": result.completion_tokens,
            "tokens_evaluated": result.prompt_tokens,
            "generation_settings": {**_settings(self._order), "stream": self._order.stream},
            "prompt": self._text.decode(submit.tokens or (), special=True),
            "has_new_line": "\n" in result.text,
            "truncated": False,
            "stop_type": STOPS.get(result.finish_reason, "none") if stop is None else "word",
            "stopping_word": stop or "",
            "tokens_cached": result.prompt_tokens + result.completion_tokens,
            "timings": timings(result),
        }


def _settings(order: Order) -> Object:
    """Return the parameters of a reply under llama-server's names."""
    submit = order.submits[0]
    sampling = submit.sampling
    return {
        "n_predict": submit.max_tokens,
        "seed": submit.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(submit.stop),
    }


def _completion(fields: Object) -> CompletionBody:
    """Return the completion of a request; in lists, prompts are token ids."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
        raise unsupported("prompt", "is a list", "send one text, or one list of token ids")
    lengths = ("n_predict", "max_tokens")
    own = {} if any(fields.get(name) is not None for name in lengths) else {"n_predict": ALL}
    return as_body(CompletionBody, {**fields, **own})


def add_llama_server(app: FastAPI, service: Service) -> None:
    """Add the routes of llama-server's API."""

    @app.post("/completion", **documented("completion"))
    async def completion(body: Object, request: Request) -> Response:
        """The continuation of a text, as llama-server has it."""
        return await service.answer(_completion(body), request, LlamaWriter)

    @app.post("/apply-template", **documented("apply_template"))
    async def apply_template(body: Object, request: Request) -> Response:
        """The prompt of a conversation, as text."""
        tokens = await service.prompt_of(as_body(ChatBody, body), request)
        target = await service.target()
        return json_response({"prompt": target.text.decode(tokens, special=True)})

    @app.get("/props", **documented("props"))
    async def props() -> Response:
        """Properties of the server, as llama-server has them."""
        target = await service.target()
        facts, sampling = target.described.vocabulary, service.terms.defaults.sampling
        name, support = service.name_of(target), await service.support(target)
        settings = {
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
        }
        ends = [target.text.token(one) for one in facts.end]
        return json_response(
            {
                "default_generation_settings": {"n_ctx": target.context, "params": settings},
                "total_slots": target.described.limits.sessions,
                "model_alias": name,
                "model_path": name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": facts.template,
                "chat_template_caps": support.described,
                "bos_token": "" if facts.begin is None else target.text.token(facts.begin),
                "eos_token": ends[0] if ends else "",
                "build_info": f"dovetail {service.terms.version}",
            }
        )

    @app.get("/slots", **documented("slots"))
    async def slots() -> Response:
        """The sessions that the target can have, the running ones first."""
        target, state = await service.target(), await service.gateway.status()
        speculative = any("draft" in worker.roles for worker in state.workers)
        common = {"n_ctx": target.context, "speculative": speculative}
        return json_response(
            [
                {"id": number, **common, "is_processing": number < state.sessions}
                for number in range(target.described.limits.sessions)
            ]
        )

"""Serves exported models with Ray Serve: POST /completions continues a prompt, POST /classify names what a picture shows.

    serve run serve.yaml

A request goes to the ingress, which checks it and asks a replica of the model. Replicas run requests in batches. A replica that dies
loses no request: the ingress asks another one. That is safe because requests are pure: decoding is greedy, nothing is kept from one
request to the next, so the answer is the same however often it is computed.
"""

import asyncio
import logging
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter

from models import ImageModel, Refused, TextModel

MAX_BATCH = 16
MAX_JSON_BYTES = 1 << 20
MAX_PICTURE_BYTES = 10 << 20
BODY_S = 20
# What Ray raises where a replica, its process or its machine is gone. Errors of the model are none of these, and not tried again.
LOST = (RayActorError, NodeDiedError, ObjectLostError, ReplicaUnavailableError)

logger = logging.getLogger("ray.serve")

REPLICA = {
    # One batch is computed while the next one fills.
    "max_ongoing_requests": 2 * MAX_BATCH,
    "health_check_period_s": 5,
    "health_check_timeout_s": 30,
    "graceful_shutdown_timeout_s": 60,
}


class Arguments(BaseModel):
    """What is served; `args` of the application in serve.yaml."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(None, description="folder of an exported language model")
    images: str | None = Field(None, description="folder of an exported image classifier")
    library: str | None = Field(None, description="libmoh_ops.so, which skips unused heads; all heads are computed without it")
    threads: int = Field(1, ge=1, description="threads of a replica, and CPUs that Ray reserves for it")
    min_replicas: int = Field(2, ge=1, description="replicas of each model; with 1, requests wait while a lost one starts again")
    max_replicas: int = Field(4, ge=1)
    max_requests: int = Field(256, ge=1, description="accepted requests of one ingress; others get 429")
    tries: int = Field(5, ge=1, description="how often a request is given to a replica before it gets 503")
    deadline_s: float = Field(60, gt=0, description="seconds from a request's arrival until it gets 503")


class Completion(BaseModel):
    """The body of POST /completions."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | Annotated[list[StrictInt], Field(max_length=1 << 17)]
    max_tokens: StrictInt = Field(16, ge=1)


@serve.deployment(**REPLICA)
class Text:
    """A replica of the language model."""

    def __init__(self, folder: str, library: str | None, threads: int) -> None:
        self.model = TextModel(folder, library, threads)
        self.tokens = Counter("moh_text_tokens", "Generated tokens")

    async def __call__(self, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
        # Checked before it joins a batch, so that a bad request harms no other one.
        tokens = self.model.encode(prompt, max_tokens)
        found = await self.generate((tokens, max_tokens))
        self.tokens.inc(max(len(found), 1))
        return {
            "text": self.model.decode(found),
            "token_ids": found,
            "finish_reason": "length" if len(found) == max_tokens else "stop",
            "usage": {"prompt_tokens": len(tokens), "completion_tokens": len(found)},
        }

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0.01)
    async def generate(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        prompts, limits = zip(*requests)
        # In a thread: the replica answers health checks and takes requests meanwhile.
        return await asyncio.to_thread(self.model.generate, prompts, limits)

    async def check_health(self) -> None:
        """Runs the model. Ray replaces the replica if this fails or hangs."""
        await asyncio.to_thread(self.model.generate, [[0]], [1])


@serve.deployment(**REPLICA)
class Images:
    """A replica of the image classifier."""

    def __init__(self, folder: str, library: str | None, threads: int) -> None:
        self.model = ImageModel(folder, library, threads)

    async def __call__(self, encoded: bytes) -> dict[str, Any]:
        pixels = await asyncio.to_thread(self.model.prepare, encoded)
        odds = await self.probabilities(pixels)
        best = odds.argsort()[::-1][:5]
        return {"classes": [{"label": self.model.labels[i], "probability": round(float(odds[i]), 6)} for i in best]}

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0.005)
    async def probabilities(self, pictures: list[Any]) -> list[Any]:
        return list(await asyncio.to_thread(self.model.probabilities, pictures))

    async def check_health(self) -> None:
        """Runs the model. Ray replaces the replica if this fails or hangs."""
        await asyncio.to_thread(self.model.probabilities, [self.model.blank()])


api = FastAPI(title="Exported models", docs_url=None, redoc_url=None)


@api.exception_handler(Refused)
async def refused(_: Request, error: Refused) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse({"detail": error.reason}, error.status, headers)


@api.exception_handler(TimeoutError)
async def late(request: Request, _: TimeoutError) -> JSONResponse:
    return await refused(request, Refused(503, "deadline: no replica has answered"))


async def read(request: Request, limit: int) -> bytes:
    """The request's body. Raises `Refused` as soon as it is longer than the limit, with or without a Content-Length."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise Refused(413, f"body: more than {limit} bytes")
    except TimeoutError:
        raise Refused(408, f"body: not complete after {BODY_S} seconds") from None
    return bytes(body)


def parse(body: bytes) -> Completion:
    try:
        return Completion.model_validate_json(body)
    except ValidationError as invalid:
        errors = invalid.errors()
        reasons = [f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']}" for error in errors[:3]]
        raise Refused(400 if errors[0]["type"] == "json_invalid" else 422, "; ".join(reasons)) from None


# It waits and computes nothing, so no CPU is reserved for it. Its limit of accepted requests has to be reached before Ray's.
@serve.deployment(num_replicas=1, max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=60)
@serve.ingress(api)
class Ingress:
    """Takes requests, refuses bad ones, and gives each good one to replicas until one has answered."""

    def __init__(self, arguments: Arguments, text: DeploymentHandle | None, images: DeploymentHandle | None) -> None:
        self.arguments = arguments
        self.text = text
        self.images = images
        self.accepted = 0
        self.retries = Counter("moh_retries", "Requests that were asked again because a replica was lost")

    @api.post("/completions")
    async def completions(self, request: Request) -> dict[str, Any]:
        async with asyncio.timeout(self.arguments.deadline_s):
            completion = parse(await read(request, MAX_JSON_BYTES))
            return await self.ask(self.text, completion.prompt, completion.max_tokens)

    @api.post("/classify")
    async def classify(self, request: Request) -> dict[str, Any]:
        async with asyncio.timeout(self.arguments.deadline_s):
            return await self.ask(self.images, await read(request, MAX_PICTURE_BYTES))

    async def ask(self, model: DeploymentHandle | None, *request: Any) -> dict[str, Any]:
        """A replica's answer, after up to `tries` lost replicas."""
        if model is None:
            raise Refused(404, "model: none of this kind is served")
        if self.accepted >= self.arguments.max_requests:
            raise Refused(429, f"busy: {self.accepted} requests are running or waiting")
        self.accepted += 1
        try:
            for attempt in range(self.arguments.tries):
                if attempt:
                    self.retries.inc()
                    await asyncio.sleep(0.05 * 2**attempt)
                try:
                    return await model.remote(*request)
                except LOST as error:
                    logger.warning("try %d of %d: %s", attempt + 1, self.arguments.tries, error)
            raise Refused(503, f"replicas: {self.arguments.tries} were lost while they had this request")
        except DeploymentUnavailableError as error:
            raise Refused(503, f"model: {error.message}") from None
        finally:
            self.accepted -= 1


def build(arguments: Arguments) -> serve.Application:
    """The application; Ray calls this with the `args` of serve.yaml."""
    if not arguments.text and not arguments.images:
        raise ValueError("args: expected the folder of a model as `text`, `images` or both")

    def model(replica: serve.Deployment, folder: str | None) -> serve.Application | None:
        if not folder:
            return None
        scaling = {
            "min_replicas": arguments.min_replicas,
            "max_replicas": max(arguments.min_replicas, arguments.max_replicas),
            "target_ongoing_requests": MAX_BATCH,
        }
        options = replica.options(autoscaling_config=scaling, ray_actor_options={"num_cpus": arguments.threads})
        return options.bind(folder, arguments.library, arguments.threads)

    return Ingress.bind(arguments, model(Text, arguments.text), model(Images, arguments.images))

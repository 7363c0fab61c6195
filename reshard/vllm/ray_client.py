"""An engine's control plane in a Ray actor; only this module's methods import Ray (extra ``reshard[ray]``)."""

from __future__ import annotations

from typing import Any

from reshard.errors import PeerTimeout, ReshardError, TransportError


class RayClient:
    """An engine in a Ray actor whose class has ``EngineClient``'s methods, such as one derived from ``LLMClient``.

    An actor that runs one call at a time, as Ray's do by default, has no requests in flight when an update starts.
    """

    def __init__(self, actor: Any, *, name: str, timeout_s: float = 300.0) -> None:
        """Borrow the handle ``actor``; ``name`` is for messages, ``timeout_s`` bounds each call."""
        self._actor, self._name, self._timeout_s = actor, name, timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """See ``EngineClient``."""
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See ``EngineClient``."""
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See ``EngineClient``."""
        self.call("finish_weight_update", weight_version)

    def reset_prefix_cache(self) -> None:
        """See ``EngineClient``."""
        self.call("reset_prefix_cache")

    def call(self, method: str, *arguments: object) -> Any:
        """Call ``method`` of the actor and return what it returned.

        Raises:
            TransportError: the actor is gone, or the method raised an error that is none of this package's or Python's.
            PeerTimeout: it did not answer in time.
            ReshardError, ValueError, ArithmeticError: as the method raised it.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=self._timeout_s)
        except GetTimeoutError as error:
            raise PeerTimeout(
                f"the engine in Ray actor {self._name!r} did not answer {method} within {self._timeout_s:g} s: raise "
                "timeout_s if the work is that long, else see what the actor waits for"
            ) from error
        except RayTaskError as error:
            raise self._refusal(method, error.cause or error) from error
        except RayActorError as error:
            raise TransportError(
                f"Ray actor {self._name!r}, which holds the engine, is gone ({method} was asked of it): start another "
                f"engine and connect to it; Ray says: {_first_line(error)}"
            ) from error
        except RayError as error:
            raise TransportError(
                f"Ray could not carry {method} to actor {self._name!r}: {_first_line(error)}"
            ) from error

    def _refusal(self, method: str, cause: BaseException) -> Exception:
        if isinstance(cause, ReshardError | ValueError | ArithmeticError):
            return cause
        return TransportError(
            f"the engine in Ray actor {self._name!r} refused {method}: {type(cause).__name__}: {cause}"
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

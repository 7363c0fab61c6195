"""The process at the other end of `algos.rewards.pool`: reads samples as JSON lines, answers each with one line.

``python -m algos.rewards.worker SPEC DEADLINE_S MEMORY_BYTES`` (0 bytes: no limit). It ends when its input does. An
alarm that no Python code handles ends it a little after the deadline even where its parent is gone.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from algos.rewards.base import RewardFunction, Sample, call
from algos.rewards.load import is_built_in, load_function

_ALARM_GRACE_S = 5.0


def main(arguments: Sequence[str]) -> None:
    """Serves one reward function until its standard input ends."""
    spec, deadline_s, memory_bytes = arguments[0], float(arguments[1]), int(arguments[2])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever the function prints must not mix with the replies
    function = load_function(spec)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if is_built_in(spec):  # what a first call loads must not count against a sample's deadline
        call(function, Sample(data_source="", response="\\boxed{1}", ground_truth="1"))
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, deadline_s + _ALARM_GRACE_S)
        reply = _score(function, line)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply + "\n")


def _score(function: RewardFunction, line: str) -> str:
    return json.dumps(asdict(call(function, Sample(**json.loads(line)))))


if __name__ == "__main__":
    main(sys.argv[1:])

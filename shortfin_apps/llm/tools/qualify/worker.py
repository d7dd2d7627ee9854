"""The process that runs checks, one line of JSON each: a name and a limit in, an outcome out.

    python -m shortfin_apps.llm.tools.qualify.worker FD PLAN

Outcomes are written to the file descriptor FD, as libraries write to stdout. SIGUSR1 writes the stacks of all
threads to stderr, which tell where a check hangs.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
from dataclasses import asdict

from shortfin_apps.llm.tools.qualify.bench import Bench, Plan
from shortfin_apps.llm.tools.qualify.checks import BY_NAME, run_check


def main(fd: int, plan: Plan) -> None:
    faulthandler.enable()  # stacks of a crash
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING)
    bench = Bench(plan)
    with os.fdopen(fd, "w") as out:
        for line in sys.stdin:
            asked = json.loads(line)
            outcome = run_check(BY_NAME[asked["check"]], bench, asked["limit_s"])
            print(json.dumps(asdict(outcome)), file=out, flush=True)
    bench.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Plan(**json.loads(sys.argv[2])))

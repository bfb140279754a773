"""The verb ``benchlib serve``: become a worker. This process is replaced by the server's, which may load torch."""

import json
import os
import sys
from typing import Any

import click

from benchlib.core.options import Finite


@click.command("serve")
@click.option("--engine", required=True, type=click.Choice(["sim", "static", "continuous"]), help="What answers.")
@click.option("--model", help="Hub name, folder, tiny, or llama3-8b-random. [default: tiny, the kit's own]")
@click.option("--device", help="Where: cpu, cuda, xpu, mps. [default: cpu]")
@click.option("--precision", help="fp32, bf16 or fp16. [default: fp32]")
@click.option("--slots", type=click.IntRange(1, 65_536), help="Queries that are worked on at once. [default: 8]")
@click.option("--threads", type=click.IntRange(0, 4_096), help="CPU threads of torch; 0: its own default. [default: 0]")
@click.option("--fixed-length", is_flag=True, default=None, help="Ignore the end of a text: max_tokens each time.")
@click.option("--step-ms", type=Finite(0, 60_000), help="sim: time of one token. [default: 10]")
@click.option("--host", help="Address to listen on; any but this machine's own needs a token. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0: any free one. [default: 8000]")
@click.option("--token-file", help="File with the bearer token. [default: the variable BENCHLIB_TOKEN]")
@click.option("--max-queue", type=click.IntRange(1, 10**6), help="Open requests; beyond them 429. [default: 4096]")
@click.option("--max-body", type=click.IntRange(1, 2**30), help="Bytes of a request; beyond them 413. [default: 4 MiB]")
@click.option("--drain-s", type=Finite(0, 86_400), help="Seconds to finish what it has after SIGTERM. [default: 60]")
def command(**options: Any) -> None:
    """Serve a language model over HTTP, until SIGTERM: a worker for `benchlib run serving --set workers=http://HOST:PORT`.

    It speaks OpenAI's completions with token ids, /health and /metrics.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    os.execv(sys.executable, [sys.executable, "-m", "benchlib.workloads.llm.server", json.dumps(chosen)])

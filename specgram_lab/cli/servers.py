"""The commands ``specgram server check``, ``specgram log`` and ``specgram metrics``; what is heavy is imported late."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
server_app = typer.Typer(no_args_is_help=True, help="Measure a running server from outside.")
DEFAULT_SETS = (("report-r0", None), ("records", 6))
"""Prompt sets of a check without ``--prompts``, and how many of each."""


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application ``specgram``."""
    app.add_typer(server_app, name="server")
    app.command("log")(read_log)
    app.command("metrics")(read_metrics)


@server_app.callback()
def _server() -> None:
    """Measure a running server from outside: no patch, no restart."""


@server_app.command("check")
def check(
    url: Annotated[str, typer.Argument(help="The server, as http://HOST:PORT.")],
    log: Annotated[
        Path | None, typer.Option("--log", help="The engine's log; what is written during the check is read.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="A JSONL file or a bundled set (report-r0, report-r1, records, ...)."),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Passes over the prompts.")] = 1,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's name; without it the first that is listed.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0)] = 0.0,
    min_p: Annotated[float, typer.Option("--min-p", min=0, max=1)] = 0.0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests at once.")] = 4,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one answer.")] = 60.0,
    total: Annotated[float, typer.Option("--total", min=0.1, help="Seconds for all requests together.")] = 600.0,
    force_tools: Annotated[
        bool, typer.Option("--force-tools", help="Let no prompt with tools be answered without a call.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Let the answers come in pieces.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Send structured-output requests, judge every answer, read metrics and log, say what is wrong and what to do.

    Exit code 1 when something is wrong. An API key is taken from SPECGRAM_API_KEY, OPENAI_API_KEY or VLLM_API_KEY.
    """
    import os

    from specgram_lab import workloads
    from specgram_lab.servers import check as checking
    from specgram_lab.servers import client, verdict
    from specgram_lab.servers.address import parse_address
    from specgram_lab.servers.asking import Ask, ToolChoice, ask
    from specgram_lab.spec import Workload

    address = parse_address(url, os.environ)
    common: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "min_p": min_p}
    asks: list[Ask] = []
    choice: ToolChoice = "required" if force_tools else "auto"
    for name, limit in ((prompts, None),) if prompts is not None else DEFAULT_SETS:
        workload = Workload(prompts=name, limit=limit, **common)
        for prompt in workloads.load(workload):
            asks.append(ask(len(asks), prompt, workload, stream=stream, tool_choice=choice))
    limits = client.Limits(concurrency=concurrency, timeout_s=timeout, total_s=total)
    seen = checking.check(address, checking.renumbered(asks, repeat), model=model, log_file=log, limits=limits)
    report = verdict.to_dict(seen)
    typer.echo(json.dumps(report, indent=1, allow_nan=False) if as_json else verdict.to_text(report))
    if not report["ok"]:
        raise typer.Exit(1)


def read_log(
    file: Annotated[Path, typer.Argument(help="An engine's log, plain or gzip; - reads standard input.")],
    as_json: JsonFlag = False,
) -> None:
    """Read an engine's log: refusals by phase, requests that died, acceptance lines. Exit code 1 if requests died."""
    from specgram_lab.servers import log, showing

    report = log.scan(sys.stdin.buffer) if str(file) == "-" else log.read_log(file)
    content = log.to_dict(report)
    typer.echo(json.dumps(content, indent=1, allow_nan=False) if as_json else showing.log_text(content))
    if report.terminated or report.phases["commit"] or report.failure_lines:
        raise typer.Exit(1)


def read_metrics(
    source: Annotated[str, typer.Argument(help="A saved exposition, or the address of a server.")],
    as_json: JsonFlag = False,
) -> None:
    """Read a server's metrics: speculative counters per engine and together. Exit code 1 if they do not fit."""
    import os

    from specgram_lab.servers import exposition, metrics, showing
    from specgram_lab.servers.address import parse_address

    headers = parse_address(source, os.environ).headers() if source.startswith(("http://", "https://")) else None
    content = metrics.to_dict(exposition.read_metrics(source, headers=headers))
    typer.echo(json.dumps(content, indent=1, allow_nan=False) if as_json else showing.metrics_text(content))
    if content["breaches"]:
        raise typer.Exit(1)

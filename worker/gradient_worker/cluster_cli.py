"""`gradient-cluster`: what a running member of a cluster talks through (operations.md, "Recipes").

Exit 0: done. 1: timeout, refusal, or another failure. 2: wrong usage. 3: there is no attempt to talk to,
because it is over or no member runs here. Only what is needed is imported: scripts call it in loops.
"""

import argparse
import json
import os
import sys

from gradient_worker.cluster_client import AttemptOver, Cluster, ClusterError

__all__ = ["main", "run"]

FAILED = 1
NO_ATTEMPT = 3
INTERRUPTED = 130
PAYLOAD_BYTES_MAX = 64 * 1024


def main() -> None:
    """Entry point of `gradient-cluster`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Returns the exit status; what is wrong is one line on standard error."""
    options = _parse(arguments)
    try:
        _check_streams(options)
        with Cluster() as cluster:
            _do(cluster, options)
    except ClusterError as error:
        _complain(str(error))
        return NO_ATTEMPT if isinstance(error, AttemptOver) else FAILED
    except BrokenPipeError:
        return FAILED
    except OSError as error:
        _complain(f"standard input or output: {error.strerror}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _complain(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"gradient-cluster: {text}\n")


def _check_streams(options: argparse.Namespace) -> None:
    """Before anything is taken that could then not be printed."""
    if options.command in {"roster", "recv"} and sys.stdout is None:
        raise ClusterError("standard output is closed")
    if options.command == "send" and options.payload is None and sys.stdin is None:
        raise ClusterError("standard input is closed, and there is no PAYLOAD")


def _do(cluster: Cluster, options: argparse.Namespace) -> None:
    if options.command == "roster":
        _print_roster(cluster, as_json=options.json)
    elif options.command == "send":
        cluster.send(options.topic, _payload(options.payload), options.to)
    elif options.command == "recv":
        _print(cluster.recv(options.topic, options.sender, options.timeout).payload)
    else:
        cluster.barrier(options.name, options.timeout)


def _payload(argument: str | None) -> bytes:
    return sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1) if argument is None else os.fsencode(argument)


def _print_roster(cluster: Cluster, *, as_json: bool) -> None:
    roster = cluster.roster()
    if as_json:
        _print(json.dumps(roster).encode() + b"\n")
        return
    for member in roster:
        me = (member["role"], member["index"]) == (cluster.role, cluster.index)
        marks = [word for word, holds in (("primary", member["primary"]), ("me", me)) if holds]
        columns = (f"{member['role']}:{member['index']}", member["worker"], member["endpoint"] or "-")
        _print("\t".join((*columns, ",".join(marks) or "-")).encode() + b"\n")


def _print(data: bytes) -> None:
    """UTF-8, whatever the locale. Without a buffer, whose rest the interpreter would write at its end."""
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser, commands = _parsers()
    command = commands.get(arguments[0]) if arguments else None
    if command is None:
        # It prints the help, or what is wrong, and ends.
        return parser.parse_args(arguments)
    # Options may stand between TOPIC and PAYLOAD.
    options = command.parse_intermixed_args(arguments[1:])
    options.command = arguments[0]
    return options


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="gradient-cluster",
        description="Talk to the other members of a cluster, from the command of a member.",
        epilog="Exit status: 1 on a timeout or refusal, 3 when the attempt is over.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    roster = commands.add_parser("roster", help="who takes part: member, worker, endpoint, marks")
    roster.add_argument("--json", action="store_true", help="as in GRADIENT_CLUSTER_ROSTER")
    send = commands.add_parser("send", help="send a signal to the other members")
    send.add_argument("topic", metavar="TOPIC")
    send.add_argument("--to", metavar="ROLE[:INDEX]", help="to this member, or all of this role, alone")
    send.add_argument("payload", metavar="PAYLOAD", nargs="?", help="standard input where it is left out")
    recv = commands.add_parser("recv", help="print the payload of the next signal that no recv has taken")
    recv.add_argument("topic", metavar="TOPIC", nargs="?", help="of this topic alone")
    recv.add_argument("--from", dest="sender", metavar="ROLE[:INDEX]", help="of this sender alone")
    recv.add_argument("--timeout", type=_secs, metavar="S", help="give up after this many seconds")
    barrier = commands.add_parser("barrier", help="wait until every member has come here")
    barrier.add_argument("name", metavar="NAME")
    barrier.add_argument("--timeout", type=_secs, metavar="S", help="give up after this many seconds")
    return parser, {"roster": roster, "send": send, "recv": recv, "barrier": barrier}


def _secs(text: str) -> float:
    secs = float(text)
    if not 0 <= secs < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no length of time")
    return secs

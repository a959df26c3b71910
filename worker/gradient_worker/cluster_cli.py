"""`gradient-cluster`: what a running member of a cluster talks through (operations.md, "Recipes").

Exit 0: done. 1: timeout, refusal, or another failure. 2: wrong usage. 3: there is no attempt to talk to,
because it is over or no member runs here. Only what is needed is imported: scripts call it in loops.
"""

import argparse
import json
import sys

from gradient_worker.cluster_client import AttemptOver, Cluster, ClusterError

__all__ = ["main", "run"]

FAILED = 1
NO_ATTEMPT = 3
PAYLOAD_BYTES_MAX = 64 * 1024


def main() -> None:
    """Entry point of `gradient-cluster`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Returns the exit status; what is wrong is one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        with Cluster() as cluster:
            _do(cluster, options)
    except ClusterError as error:
        sys.stderr.write(f"gradient-cluster: {error}\n")
        return NO_ATTEMPT if isinstance(error, AttemptOver) else FAILED
    except BrokenPipeError:
        return FAILED
    return 0


def _do(cluster: Cluster, options: argparse.Namespace) -> None:
    if options.command == "roster":
        _print_roster(cluster, as_json=options.json)
    elif options.command == "send":
        payload = options.payload
        if payload is None:
            payload = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
        else:
            payload = payload.encode(errors="surrogateescape")
        cluster.send(options.topic, payload, options.to)
    elif options.command == "recv":
        signal = cluster.recv(options.topic, options.sender, options.timeout)
        sys.stdout.buffer.write(signal.payload)
        sys.stdout.buffer.flush()
    else:
        cluster.barrier(options.name, options.timeout)


def _print_roster(cluster: Cluster, *, as_json: bool) -> None:
    roster = cluster.roster()
    if as_json:
        sys.stdout.write(json.dumps(roster) + "\n")
        return
    for member in roster:
        me = (member["role"], member["index"]) == (cluster.role, cluster.index)
        marks = [word for word, holds in (("primary", member["primary"]), ("me", me)) if holds]
        columns = (f"{member['role']}:{member['index']}", member["worker"], member["endpoint"] or "-")
        sys.stdout.write("\t".join((*columns, ",".join(marks) or "-")) + "\n")


def _parser() -> argparse.ArgumentParser:
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
    send.add_argument("payload", metavar="PAYLOAD", nargs="?", help="standard input where it is left out")
    send.add_argument("--to", metavar="ROLE[:INDEX]", help="to this member, or all of this role, alone")
    recv = commands.add_parser("recv", help="print the payload of the next signal that no recv has taken")
    recv.add_argument("topic", metavar="TOPIC", nargs="?", help="of this topic alone")
    recv.add_argument("--from", dest="sender", metavar="ROLE[:INDEX]", help="of this sender alone")
    recv.add_argument("--timeout", type=_secs, metavar="S", help="give up after this many seconds")
    barrier = commands.add_parser("barrier", help="wait until every member has come here")
    barrier.add_argument("name", metavar="NAME")
    barrier.add_argument("--timeout", type=_secs, metavar="S", help="give up after this many seconds")
    return parser


def _secs(text: str) -> float:
    secs = float(text)
    if not 0 <= secs < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no length of time")
    return secs

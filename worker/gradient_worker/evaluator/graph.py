"""From recipes to derivations: paths, order, and the batches they are reported in (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from gradient_protocol import store_paths
from gradient_protocol.messages import shapes

from gradient_worker.evaluator.checks import Group
from gradient_worker.evaluator.environment import SOURCE, package_name
from gradient_worker.evaluator.recipe import Build, Cluster, Recipe

__all__ = ["Graph", "Node", "batches"]

# A report must stay far below the 4 MiB of a message, and a batch's commit short.
_BATCH_DERIVATIONS = 500
_BATCH_BYTES = 512 * 1024
# The most that one derivation, or one cluster with its members, may take: they cannot be divided.
MAX_UNIT_BYTES = 3 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Node:
    """A derivation of the graph: its place in the order, its inputs' names, its cluster if any."""

    number: int
    build: Build
    derivation: shapes.Derivation
    cluster: str | None


@dataclass(frozen=True, slots=True)
class _Draft:
    build: Build
    form: store_paths.Form


class Graph:
    """All derivations of an evaluation so far, in dependency order, by name."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.clusters: dict[str, shapes.Cluster] = {}
        self._members: dict[str, list[str]] = {}

    def add(self, recipe: Recipe, groups: Iterable[Group], source: str) -> list[Build]:
        """Add a checked recipe, groups in the order of `checks.order`; `source` is its tree's path.

        Returns the builds that are too large to be reported; then the graph is of no use.
        """
        cluster_of = {member.build: cluster for cluster in recipe.clusters for member in cluster.members}
        too_large: list[Build] = []
        for group in groups:
            drafts = [_Draft(build, self._form(build, source)) for build in group]
            cluster = cluster_of.get(group[0].name)
            form = None if cluster is None else _cluster_form(cluster, drafts)
            name = None if cluster is None else cluster.name
            size_bytes = sum(self._finish(draft, name, form, source) for draft in drafts)
            if cluster is not None:
                self._members[cluster.name] = [member.build for member in cluster.members]
                self.clusters[cluster.name] = self._cluster(cluster)
            if size_bytes > MAX_UNIT_BYTES:
                too_large.append(group[0])
        return too_large

    def closure(
        self, names: Iterable[str], pruned: frozenset[str] = frozenset(), also: Iterable[str] = ()
    ) -> list[Node]:
        """The named builds with all they need, and all members of a cluster that has one, in order.

        What is `pruned` (drv paths) is left out with what only it needs, unless it is in `names`
        or a member; `also` are further builds to start from, which may be pruned.
        """
        found: dict[str, None] = {}
        asked = set(names)
        pending = [*asked, *also]
        while pending:
            name = pending.pop()
            node = self.nodes[name]
            known = node.derivation.drv_path in pruned and name not in asked and node.cluster is None
            if name in found or known:
                continue
            found[name] = None
            pending += node.build.needs
            pending += self._members[node.cluster] if node.cluster else ()
        return sorted((self.nodes[name] for name in found), key=lambda node: node.number)

    def _form(self, build: Build, source: str) -> store_paths.Form:
        needed = [self.nodes[name].derivation for name in build.needs]
        return store_paths.recipe_form(
            name=build.name,
            system=build.system,
            features=build.features,
            command=build.command,
            env=build.env,
            outputs=build.outputs,
            inputs={each.drv_path: [output.name for output in each.outputs] for each in needed},
            sources=[source] if SOURCE in build.inputs else [],
            fixed_output=build.fixed_output,
        )

    def _finish(
        self, draft: _Draft, cluster: str | None, cluster_form: store_paths.Form | None, source: str
    ) -> int:
        """Add the node of a build whose group's forms are all known; returns its size on the wire."""
        build = draft.build
        drv_path = store_paths.derivation_path(draft.form, cluster_form)
        derivation = shapes.Derivation(
            drv_path=drv_path,
            name=build.name,
            pname=package_name(build.name),
            system=build.system,
            features=list(build.features),
            command=list(build.command),
            env=dict(build.env),
            outputs=[
                shapes.DerivationOutput(
                    name=output,
                    path=store_paths.output_path(drv_path, build.name, output, build.fixed_output),
                )
                for output in build.outputs
            ],
            inputs=[self._edge(name) for name in build.needs],
            sources=[source] if SOURCE in build.inputs else [],
            fixed_output=build.fixed_output,
            prefer_local=build.prefer_local,
            timeout_secs=build.timeout_secs,
            max_silent_secs=build.max_silent_secs,
        )
        self.nodes[build.name] = Node(len(self.nodes), build, derivation, cluster)
        return len(msgspec.msgpack.encode(derivation))

    def _edge(self, name: str) -> shapes.DerivationInput:
        needed = self.nodes[name].derivation
        return shapes.DerivationInput(
            drv_path=needed.drv_path,
            outputs=[output.name for output in needed.outputs],
            name=name,
            runtime_only=False,
        )

    def _cluster(self, cluster: Cluster) -> shapes.Cluster:
        return shapes.Cluster(
            name=cluster.name,
            same_zone=cluster.same_zone,
            retry_budget=cluster.retry_budget,
            members=[
                shapes.ClusterMember(
                    drv_path=self.nodes[member.build].derivation.drv_path,
                    role=member.role,
                    primary=member.primary,
                    pin=member.pin,
                )
                for member in cluster.members
            ],
        )


def _cluster_form(cluster: Cluster, drafts: Sequence[_Draft]) -> store_paths.Form:
    members = [
        store_paths.member_form(role=member.role, primary=member.primary, pin=member.pin, recipe=draft.form)
        for member, draft in zip(cluster.members, drafts, strict=True)
    ]
    return store_paths.cluster_form(
        name=cluster.name, same_zone=cluster.same_zone, retry_budget=cluster.retry_budget, members=members
    )


def batches(
    graph: Graph, nodes: Sequence[Node], attrs: Mapping[str, str]
) -> Iterator[tuple[list[shapes.Derivation], list[shapes.Cluster]]]:
    """Cut `nodes`, in order and with whole clusters, into batches; `attrs` maps names to what was asked.

    A cluster comes with all its members in one batch.
    """
    derivations: list[shapes.Derivation] = []
    clusters: list[shapes.Cluster] = []
    size_bytes = 0
    for unit in _units(nodes):
        added = [_marked(node, attrs) for node in unit]
        added_bytes = sum(len(msgspec.msgpack.encode(each)) for each in added)
        full = len(derivations) + len(added) > _BATCH_DERIVATIONS or size_bytes + added_bytes > _BATCH_BYTES
        if derivations and full:
            yield derivations, clusters
            derivations, clusters, size_bytes = [], [], 0
        derivations += added
        size_bytes += added_bytes
        if (name := unit[0].cluster) is not None:
            clusters.append(graph.clusters[name])
    if derivations:
        yield derivations, clusters


def _units(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    unit: list[Node] = []
    for node in nodes:
        if unit and (node.cluster is None or node.cluster != unit[-1].cluster):
            yield unit
            unit = []
        unit.append(node)
    if unit:
        yield unit


def _marked(node: Node, attrs: Mapping[str, str]) -> shapes.Derivation:
    attr = attrs.get(node.build.name)
    return node.derivation if attr is None else msgspec.structs.replace(node.derivation, attr=attr)

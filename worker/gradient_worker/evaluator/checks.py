"""What can be wrong between the entries of a recipe: names, inputs, cycles, clusters (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradient_worker.evaluator.environment import OUT, SOURCE, input_variable, is_reserved
from gradient_worker.evaluator.problems import Problem, suggestion
from gradient_worker.evaluator.recipe import Build, Member, Recipe

__all__ = ["Earlier", "Group", "check", "order"]

# More members than a server takes connections (proto.maxConnections) could never start together.
MAX_MEMBERS = 1024
# How much of a long cycle a message shows.
_MAX_TOLD = 10

# What is decided together: one build alone, or the members of a cluster.
Group = tuple[Build, ...]


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the recipes read before this one, whose imports led to it, have defined.

    `helpers` maps each member of a cluster with a primary, itself apart, to the cluster's name.
    """

    builds: Mapping[str, Build] = field(default_factory=dict)
    clusters: frozenset[str] = frozenset()
    helpers: Mapping[str, str] = field(default_factory=dict)

    def with_recipe(self, recipe: Recipe) -> "Earlier":
        """The same with one more recipe, which nothing was wrong with."""
        return Earlier(
            {**self.builds, **{build.name: build for build in recipe.builds}},
            self.clusters | {cluster.name for cluster in recipe.clusters},
            {**self.helpers, **_helpers(recipe)},
        )


def check(recipe: Recipe, earlier: Earlier) -> list[Problem]:
    """Everything wrong with `recipe`, whose builds may need those of `earlier` recipes too."""
    builds = {**earlier.builds, **{build.name: build for build in reversed(recipe.builds)}}
    problems = list(_names(recipe, earlier))
    for build in recipe.builds:
        problems += _inputs(build, builds)
    problems += _clusters(recipe)
    problems += _needed_helpers(recipe, earlier)
    problems += [
        Problem(("import", index), f"import of an unknown build {name!r:.80}{suggestion(name, builds)}")
        for index, name in enumerate(recipe.imports)
        if name not in builds
    ]
    return problems


def _names(recipe: Recipe, earlier: Earlier) -> Iterable[Problem]:
    seen = set(earlier.builds)
    for build in recipe.builds:
        if build.name in seen and build.name:
            yield Problem((*build.place, "name"), f"two builds have the name {build.name!r}")
        seen.add(build.name)
    clusters = set(earlier.clusters)
    for cluster in recipe.clusters:
        if cluster.name in clusters and cluster.name:
            yield Problem((*cluster.place, "name"), f"two clusters have the name {cluster.name!r}")
        clusters.add(cluster.name)


def _title(build: Build) -> str:
    return f"build {build.name!r}: " if build.name else ""


def _inputs(build: Build, builds: Mapping[str, Build]) -> Iterable[Problem]:
    taken = {output: f"its own output {output!r}" for output in build.outputs}
    for index, name in enumerate(build.inputs):
        place = (*build.place, "inputs", index)
        if name != SOURCE and name not in builds:
            yield Problem(place, f"{_title(build)}unknown input {name!r:.80}{suggestion(name, builds)}")
            continue
        for output in (OUT,) if name == SOURCE else builds[name].outputs:
            variable = input_variable(name, output)
            title = f"{_title(build)}input {name!r} would be {variable}"
            if is_reserved(variable):
                yield Problem(place, f"{title}, which a build's environment has already")
            elif variable in taken:
                yield Problem(place, f"{title}, and so would {taken[variable]}")
            taken[variable] = f"input {name!r}"


def _clusters(recipe: Recipe) -> Iterable[Problem]:
    builds = {build.name: build for build in recipe.builds}
    cluster_of: dict[str, str] = {}
    for cluster in recipe.clusters:
        title = f"cluster {cluster.name!r}: " if cluster.name else ""
        if len(cluster.members) > MAX_MEMBERS:
            yield Problem((*cluster.place, "member"), f"{title}over {MAX_MEMBERS} members")
            continue
        primary: Member | None = None
        pins: set[str] = set()
        for member in cluster.members:
            build = builds.get(member.build)
            if build is None:
                where = suggestion(member.build, builds)
                message = f"{title}member of an unknown build {member.build!r:.80}{where}"
                yield Problem((*member.place, "build"), message)
            elif build.fixed_output is not None:
                yield Problem((*member.place, "build"), f"{title}the download {build.name!r} runs no command")
            if member.build in cluster_of:
                other = f"cluster {cluster_of[member.build]!r}" if cluster_of[member.build] else "a cluster"
                message = f"{title}build {member.build!r} is a member of {other} already"
                yield Problem((*member.place, "build"), message)
            cluster_of[member.build] = cluster.name
            if member.primary and primary is not None:
                message = f"{title}{primary.build!r} and {member.build!r} are both primary"
                yield Problem((*member.place, "primary"), message)
            primary = member if member.primary else primary
            if member.pin is not None and member.pin in pins:
                message = f"{title}two members are pinned to worker {member.pin!r}, each needs its own"
                yield Problem((*member.place, "pin"), message)
            pins.add(member.pin or "")


def _helpers(recipe: Recipe) -> dict[str, str]:
    return {
        member.build: cluster.name
        for cluster in recipe.clusters
        if any(member.primary for member in cluster.members)
        for member in cluster.members
        if not member.primary
    }


def _needed_helpers(recipe: Recipe, earlier: Earlier) -> Iterable[Problem]:
    # Once the primary has succeeded the others are aborted, so nothing can count on their outputs.
    helpers = {**earlier.helpers, **_helpers(recipe)}
    for build in recipe.builds:
        for index, name in enumerate(build.inputs):
            if name in helpers:
                message = (
                    f"{_title(build)}needs {name!r}, which is a helper of the primary of cluster "
                    f"{helpers[name]!r} and may be aborted"
                )
                yield Problem((*build.place, "inputs", index), message)


def order(recipe: Recipe) -> list[Group] | Problem:
    """The builds in an order in which each comes after what it needs, or the cycle that forbids it.

    The members of a cluster start together, so they count as one and come one after another. Of use is
    the order of a recipe that `check` has nothing against, but a cycle is told of any.
    """
    builds = {build.name: build for build in recipe.builds}
    titles = dict.fromkeys(builds, "")
    groups: list[Group] = []
    in_cluster: set[str] = set()
    for cluster in recipe.clusters:
        names = [member.build for member in cluster.members if member.build in builds]
        groups.append(tuple(builds[name] for name in dict.fromkeys(names) if name not in in_cluster))
        titles.update((name, f" (cluster {cluster.name!r})") for name in names if name not in in_cluster)
        in_cluster.update(names)
    groups += [(build,) for build in recipe.builds if build.name not in in_cluster]
    group_of = {build.name: number for number, group in enumerate(groups) for build in group}
    # `titles` has the builds in the order of the file, which the result follows where it is free to.
    return _sorted(groups, group_of, {name: name + title for name, title in titles.items()})


def _sorted(
    groups: Sequence[Group], group_of: Mapping[str, int], titles: Mapping[str, str]
) -> list[Group] | Problem:
    # Depth first, with a stack of our own: a chain may be longer than the interpreter's stack. Each
    # entry is a group, its edges still to be looked at, and the one looked at last.
    found: list[Group] = []
    done: set[int] = set()
    for root in dict.fromkeys(group_of[name] for name in titles):
        stack = [] if root in done else [_Visit(root, groups[root], group_of)]
        on_stack = {root}
        while stack:
            edge = stack[-1].step()
            if edge is None:
                number = stack.pop().number
                on_stack.discard(number)
                done.add(number)
                found.append(groups[number])
                continue
            below = group_of[edge[1]]
            if below in on_stack:
                start = next(at for at, visit in enumerate(stack) if visit.number == below)
                return _cycle(
                    [visit.edge for visit in stack[start:] if visit.edge], titles, groups[stack[-1].number]
                )
            if below not in done:
                on_stack.add(below)
                stack.append(_Visit(below, groups[below], group_of))
    return found


class _Visit:
    """A group on the stack of the search. An edge is who needs, and what."""

    def __init__(self, number: int, group: Group, group_of: Mapping[str, int]) -> None:
        self.number = number
        self.edge: tuple[str, str] | None = None
        self._edges = ((build.name, name) for build in group for name in build.needs if name in group_of)

    def step(self) -> tuple[str, str] | None:
        self.edge = next(self._edges, None)
        return self.edge


def _cycle(edges: Sequence[tuple[str, str]], titles: Mapping[str, str], group: Group) -> Problem:
    needing, needed = edges[-1]
    build = next(build for build in group if build.name == needing)
    place = (*build.place, "inputs", build.inputs.index(needed))
    told = [f"{titles[who]} needs {titles[what]}" for who, what in edges]
    if len(told) > _MAX_TOLD:
        told = [*told[: _MAX_TOLD - 1], "...", told[-1]]
    why = "" if all(titles[name] == name for edge in edges for name in edge) else "; members start together"
    return Problem(place, f"a cycle: {', '.join(told)}{why}")

"""What is submitted: a cluster, what its members need, and what needs one of them."""

from dataclasses import dataclass

from gradient_protocol.messages.shapes import Cluster, ClusterMember, Derivation

from tests.fixtures.graph import store_path
from tests.integration.graph.pool import derivation

__all__ = ["Shape"]


@dataclass(frozen=True)
class Shape:
    """Members 0 to `size`-1, those in `on_base` need `base`; `top` needs one that may be needed."""

    size: int
    primary: int | None
    on_base: frozenset[int]
    budget: int

    @property
    def names(self) -> list[str]:
        return [f"m{number}" for number in range(self.size)]

    def tree(self) -> list[Derivation]:
        needed = self.names[self.primary or 0]
        parts = [
            derivation(name, *(["base"] if number in self.on_base else []))
            for number, name in enumerate(self.names)
        ]
        return [derivation("base"), *parts, derivation("top", needed)]

    def cluster(self) -> Cluster:
        return Cluster(
            name="group",
            same_zone=False,
            retry_budget=self.budget,
            members=[
                ClusterMember(drv_path=store_path(f"{name}.drv"), role="node", primary=number == self.primary)
                for number, name in enumerate(self.names)
            ],
        )

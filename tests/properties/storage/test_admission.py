"""What holds of upload admission after any history, and that every history ends well."""

from gradient_server.storage.admission import Decision, Expired, Grant, Skip, UploadAdmission
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

LEASE = 100.0
SESSIONS = ["a", "b", "c"]
PATHS = ["p", "q", "r", "s"]


class Admission(RuleBasedStateMachine):
    """A model that knows every request's state from the decisions alone."""

    @initialize(concurrency=st.integers(1, 3), budget=st.integers(1, 50))
    def make(self, concurrency: int, budget: int) -> None:
        self.concurrency = concurrency
        self.budget = budget
        self.uploads = UploadAdmission(concurrency=concurrency, bytes_budget=budget, lease_idle_secs=LEASE)
        self.now = 0.0
        self.made = 0
        # request -> (session, path, size, may_skip); of those that run, those that wait, those kept
        self.all: dict[str, tuple[str, str, int, bool]] = {}
        self.running: set[str] = set()
        self.waiting: set[str] = set()
        self.kept: set[str] = set()

    def apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            request = decision.request_id
            if isinstance(decision, Grant):
                assert request in self.waiting | self.running
                assert decision.session == self.all[request][0]
                self.waiting.discard(request)
                self.running.add(request)
            elif isinstance(decision, Skip):
                assert request in self.waiting
                assert self.all[request][3]
                self.waiting.discard(request)
            elif isinstance(decision, Expired):
                assert request in (self.kept if decision.session is None else self.running)
                self.kept.discard(request)
                self.running.discard(request)

    @rule(
        session=st.sampled_from(SESSIONS),
        path=st.sampled_from(PATHS),
        size=st.integers(0, 60),
        may_skip=st.booleans(),
    )
    def ask(self, session: str, path: str, size: int, may_skip: bool) -> None:
        self.made += 1
        request = f"r{self.made}"
        self.all[request] = (session, path, size, may_skip)
        self.waiting.add(request)
        self.apply(self.uploads.request(session, request, path, size, self.now, may_skip=may_skip))

    @precondition(lambda self: self.running | self.waiting | self.kept)
    @rule(data=st.data(), session=st.sampled_from(SESSIONS))
    def ask_again(self, data: st.DataObject, session: str) -> None:
        request = data.draw(st.sampled_from(sorted(self.running | self.waiting | self.kept)))
        before, path, size, may_skip = self.all[request]
        if request in self.kept or before != session:
            self.running.discard(request)
            self.kept.discard(request)
            self.waiting.add(request)
        self.all[request] = (session, path, size, may_skip)
        self.apply(self.uploads.request(session, request, path, size, self.now, may_skip=may_skip))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), committed=st.booleans())
    def finish(self, data: st.DataObject, committed: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        _, path, _, may_skip = self.all[request]
        equal = {other for other in self.waiting if self.all[other][1] == path and self.all[other][3]}
        self.running.discard(request)
        decisions = self.uploads.finished(request, self.now, committed=committed)
        skipped = {decision.request_id for decision in decisions if isinstance(decision, Skip)}
        assert skipped == (equal if committed and may_skip else set())
        self.apply(decisions)

    @precondition(lambda self: self.running | self.waiting | self.kept)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.running | self.waiting | self.kept)))
        for state in (self.running, self.waiting, self.kept):
            state.discard(request)
        self.apply(self.uploads.cancel(request, self.now))

    @rule(session=st.sampled_from(SESSIONS))
    def end_session(self, session: str) -> None:
        mine = {request for request, entry in self.all.items() if entry[0] == session}
        self.kept |= self.running & mine
        self.running -= mine
        self.waiting -= mine
        self.apply(self.uploads.session_ended(session, self.now))

    @rule(secs=st.floats(0, 150))
    def wait(self, secs: float) -> None:
        self.now += secs
        self.apply(self.uploads.expire(self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self.uploads.progress(data.draw(st.sampled_from(sorted(self.running))), self.now)

    @invariant()
    def it_never_exceeds_its_limits(self) -> None:
        if not hasattr(self, "uploads"):
            return
        sizes = [self.all[request][2] for request in self.running]
        assert self.uploads.granted == len(self.running) <= self.concurrency
        assert self.uploads.granted_bytes == sum(sizes)
        assert sum(sizes) <= self.budget or len(sizes) == 1
        assert self.uploads.waiting == len(self.waiting)

    @invariant()
    def one_upload_of_a_path_runs(self) -> None:
        if hasattr(self, "uploads"):
            paths = [self.all[request][1] for request in self.running if self.all[request][3]]
            assert len(paths) == len(set(paths))

    @invariant()
    def somebody_runs_if_anybody_waits(self) -> None:
        if hasattr(self, "uploads") and self.waiting:
            assert self.running

    def teardown(self) -> None:
        """Once nothing new comes, everyone is served and nothing is left."""
        if not hasattr(self, "uploads"):
            return
        for _ in range(len(self.waiting) + len(self.running)):
            if not self.running:
                break
            request = min(self.running, key=lambda name: int(name[1:]))
            self.running.discard(request)
            self.apply(self.uploads.finished(request, self.now, committed=True))
        assert not self.waiting
        assert not self.running
        self.now += 2 * LEASE
        self.apply(self.uploads.expire(self.now))
        assert not self.kept
        assert (self.uploads.granted, self.uploads.granted_bytes, self.uploads.waiting) == (0, 0, 0)
        assert self.uploads.next_expiry() is None


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

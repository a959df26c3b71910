"""What no state of the database may show of clusters: a name, and a query that finds it."""

from typing import Final

__all__ = ["NEVER"]

NEVER: Final = {
    "two open attempts of a cluster": "SELECT cluster_job FROM cluster_attempt"
    " WHERE finished_at IS NULL GROUP BY cluster_job HAVING COUNT(*) > 1",
    "a member ran alone": "SELECT a.id FROM dispatched_job a JOIN cluster_member m"
    " ON m.derivation_build = a.derivation_build WHERE a.finished_at IS NULL"
    " AND a.cluster_attempt IS NULL",
    "an open row of a closed attempt": "SELECT a.id FROM dispatched_job a JOIN cluster_attempt t"
    " ON t.id = a.cluster_attempt WHERE a.finished_at IS NULL AND t.finished_at IS NOT NULL",
    "an open attempt without all its rows": "SELECT t.id FROM cluster_attempt t"
    " WHERE t.finished_at IS NULL AND (SELECT COUNT(*) FROM dispatched_job a"
    "  WHERE a.cluster_attempt = t.id AND a.finished_at IS NULL)"
    " <> (SELECT COUNT(*) FROM cluster_member m WHERE m.cluster_job = t.cluster_job)",
    "Assigned without a row": "SELECT b.id FROM derivation_build b WHERE b.status = 'Assigned'"
    " AND NOT EXISTS (SELECT 1 FROM dispatched_job a WHERE a.derivation_build = b.id"
    "  AND a.finished_at IS NULL)",
    "a row without Assigned": "SELECT b.id FROM derivation_build b JOIN dispatched_job a"
    " ON a.derivation_build = b.id AND a.finished_at IS NULL WHERE b.status <> 'Assigned'",
    "an attempt started before all accepted": "SELECT t.id FROM cluster_attempt t"
    " JOIN dispatched_job a ON a.cluster_attempt = t.id"
    " WHERE t.started_at IS NOT NULL AND a.accepted_at IS NULL",
    "Running without an open started attempt, or the reverse": "SELECT c.id FROM cluster_job c"
    " WHERE (c.status = 'Running') <> EXISTS (SELECT 1 FROM cluster_attempt t"
    "  WHERE t.cluster_job = c.id AND t.finished_at IS NULL AND t.started_at IS NOT NULL)",
    "an ended cluster with an open attempt": "SELECT c.id FROM cluster_job c JOIN cluster_attempt t"
    " ON t.cluster_job = c.id AND t.finished_at IS NULL WHERE c.finished_at IS NOT NULL",
    "an ended cluster with a member that waits": "SELECT c.id FROM cluster_job c"
    " JOIN cluster_member m ON m.cluster_job = c.id JOIN derivation_build b"
    " ON b.id = m.derivation_build WHERE c.finished_at IS NOT NULL AND b.finished_at IS NULL",
    "a completed build whose outputs are not recorded": "SELECT b.id FROM derivation_build b"
    " JOIN derivation_output o ON o.derivation = b.derivation"
    " WHERE b.status = 'Completed' AND o.nar_hash IS NULL",
    "an evaluation that has ended with a wish that has not": "SELECT v.id FROM evaluation v"
    " JOIN build_job j ON j.evaluation = v.id AND j.outcome IS NULL WHERE v.finished_at IS NOT NULL",
    "an upload that no verdict takes": "SELECT u.request FROM upload u WHERE NOT u.committed"
    " AND NOT EXISTS (SELECT 1 FROM dispatched_job a WHERE a.id = u.assignment"
    "  AND a.finished_at IS NULL)",
    "more started attempts than the budget allows": "SELECT c.id FROM cluster_job c"
    " WHERE c.attempts > c.retry_budget + 1",
}

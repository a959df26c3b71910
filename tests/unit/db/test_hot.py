"""Hot statements: one spelling of parameters for two drivers."""

import pytest
import sqlalchemy as sa
from gradient_server.db.hot import HotStatement, array_of, execute_text, texts_in


def test_parameters_are_spelled_for_each_driver() -> None:
    statement = HotStatement("SELECT :a_b, x::text, '%' FROM t WHERE c = :a_b")
    assert statement.text("sqlite") == "SELECT :a_b, x::text, '%' FROM t WHERE c = :a_b"
    assert statement.text("postgresql") == "SELECT %(a_b)s, x::text, '%%' FROM t WHERE c = %(a_b)s"


def test_postgresql_may_have_words_of_its_own() -> None:
    statement = HotStatement("SELECT :x", "SELECT CAST(:x AS JSON)")
    assert statement.text("sqlite") == "SELECT :x"
    assert statement.text("postgresql") == "SELECT CAST(%(x)s AS JSON)"


def test_rows_come_as_tuples_and_nothing_as_an_empty_list() -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        assert execute_text(connection, HotStatement("CREATE TABLE t (a, b)"), {}) == []
        insert = HotStatement("INSERT INTO t VALUES (:a, :b)")
        for values in ({"a": 1, "b": "x"}, {"a": 2, "b": "it's"}):
            assert execute_text(connection, insert, values) == []
        among = HotStatement(f"SELECT a, b FROM t WHERE {texts_in('b', 'wanted')[0]} ORDER BY a")
        assert execute_text(connection, among, {"wanted": array_of(connection, ["it's", "y"])}) == [
            (2, "it's")
        ]
        assert execute_text(connection, among, {"wanted": array_of(connection, [])}) == []
    engine.dispose()


@pytest.mark.parametrize("name", ["mysql", "oracle"])
def test_other_databases_have_no_words(name: str) -> None:
    with pytest.raises(KeyError):
        HotStatement("SELECT 1").text(name)

"""What the body of every request is checked for, whatever it asks (docs/http.md)."""

from typing import Any

from pydantic import BaseModel, model_validator

__all__ = ["RequestBody"]


class RequestBody(BaseModel):
    r"""The base of every request's body. Its text is what every database stores.

    JSON can spell what is none: NUL (`\u0000`), and half a surrogate pair (`\ud800`).
    """

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:  # noqa: ANN401 - JSON of any shape
        if isinstance(content, dict):
            for key, value in content.items():
                wrong = _what_is_wrong(value)
                if wrong is not None:
                    raise ValueError(f"{str(key)[:60]!a} holds {wrong}: leave it out")
        return content


def _what_is_wrong(value: object) -> str | None:
    if isinstance(value, list):
        return next((wrong for each in value if (wrong := _what_is_wrong(each)) is not None), None)
    if not isinstance(value, str):
        return None
    if "\0" in value:
        return "a NUL character"
    return "half a surrogate pair" if any("\ud800" <= letter <= "\udfff" for letter in value) else None

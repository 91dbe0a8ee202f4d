"""Which encoding a text that is not UTF-8 is probably in: a guess for the line that refuses it."""

import codecs

LOOKED_AT = 1 << 16  # bytes

# What is most frequent in running text of a language, and hardly there in what its bytes are in another encoding:
# function words, endings, small letters (for Chinese the top of Jun Da's "Modern Chinese Character Frequency
# List", 2004).
_CHINESE, _TRADITIONAL = "的一是不了在人有我他这个们中来上大为和国", "的一是不了在人有我他這個們中來上大為和國"
_JAPANESE, _KOREAN, _RUSSIAN = "のにはをたがでてとしれさるなもいう", "이다는을의에가한고지로사어자하", "оеаинтсрвл"
_WESTERN = "äöüßéèàçñáíóúâêôåøæ"
_MARKS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
          (codecs.BOM_UTF16_BE, "UTF-16"))  # fmt: skip
_CANDIDATES = (
    ("GBK", _CHINESE),
    ("GB18030", _CHINESE),
    ("BIG5", _TRADITIONAL),
    ("SHIFT_JIS", _JAPANESE),
    ("EUC-JP", _JAPANESE),
    ("EUC-KR", _KOREAN),
    ("WINDOWS-1251", _RUSSIAN),
    ("KOI8-R", _RUSSIAN),
    ("WINDOWS-1252", _WESTERN),
)
LEAST_SHARE = 0.1  # of the characters beyond ASCII; in running text of these languages it is more


def probable_encoding(content: bytes) -> str | None:
    """The name, as `iconv` knows it, of the encoding in which the text reads most like one; None where in none."""
    for mark, name in _MARKS:
        if content.startswith(mark):
            return name
    sample = content[:LOOKED_AT]
    if b"\0" in sample:
        return None
    shares = {name: _share(sample, name, frequent) for name, frequent in _CANDIDATES}
    best = max(shares, key=lambda name: shares[name])  # of equal ones the first
    return best if shares[best] >= LEAST_SHARE else None


def what_to_do(content: bytes) -> str:
    """The rest of a line about a text that is not UTF-8."""
    name = probable_encoding(content)
    if name is None:
        return "convert it to UTF-8, or remove it"
    return f"it is probably {name}: convert it with iconv -f {name} -t UTF-8, or remove it"


def _share(sample: bytes, encoding: str, frequent: str) -> float:
    """How much of the text beyond ASCII is among the frequent characters; 0 where it cannot be read."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)  # the last character may be cut
    except UnicodeDecodeError:
        return 0.0
    beyond = [character for character in text if not character.isascii()]
    return sum(character in frequent for character in beyond) / len(beyond) if beyond else 0.0

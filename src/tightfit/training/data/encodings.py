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
# Encodings of two bytes: where the standards put characters of daily use (level 1 of GB 2312, Big5 and JIS X 0208,
# Japanese syllables, Korean syllables). Hardly any text of single bytes can be read in pairs to its end.
_DAILY = {
    "GBK": ((0xB0A1, 0xD7F9),),
    "GB18030": ((0xB0A1, 0xD7F9),),
    "BIG5": ((0xA440, 0xC67E),),
    "SHIFT_JIS": ((0x829F, 0x8396), (0x889F, 0x9872)),
    "EUC-JP": ((0xA4A1, 0xA5F6), (0xB0A1, 0xCFD3)),
    "EUC-KR": ((0xB0A1, 0xC8FE),),
}
LEAST_DAILY, LEAST_PAIRS = 0.75, 8
LEAST_SHARE = 0.1  # of the characters beyond ASCII; in running text of these languages it is more


def probable_encoding(content: bytes) -> str | None:
    """The name, as `iconv` knows it, of the encoding in which the text reads most like one; None where in none."""
    for mark, name in _MARKS:
        if content.startswith(mark):
            return name
    sample = content[:LOOKED_AT]
    if b"\0" in sample:
        return None
    daily = {name: _daily_share(sample, name) for name in _DAILY}
    likely = {name for name, share in daily.items() if share >= max(LEAST_DAILY, 0.95 * max(daily.values()))}
    if likely:  # whose frequent words need not be in a technical text; the smallest set that holds it says most
        return min((name for name, _ in _CANDIDATES if name in likely), key=_daily_size)
    shares = {name: _share(sample, name, frequent) for name, frequent in _CANDIDATES}
    best = max(shares, key=lambda name: shares[name])  # of equal ones the first
    return best if shares[best] >= LEAST_SHARE else None


def what_to_do(content: bytes) -> str:
    """The rest of a line about a text that is not UTF-8."""
    name = probable_encoding(content)
    if name is None:
        return "convert it to UTF-8, or remove it"
    return f"it is probably {name}: convert it with iconv -f {name} -t UTF-8, or remove it"


def _daily_share(sample: bytes, encoding: str) -> float:
    """How many of the characters of two bytes are those of daily use; 0 where the text cannot be read, or has few."""
    text = _decoded(sample, encoding)
    pairs = [pair for c in text or "" if not c.isascii() and len(pair := c.encode(encoding, "replace")) == 2]
    letters = [pair for pair in map(int.from_bytes, pairs) if not _is_mark(pair)]
    if len(letters) < LEAST_PAIRS:
        return 0.0
    return sum(any(low <= pair <= high for low, high in _DAILY[encoding]) for pair in letters) / len(letters)


def _daily_size(encoding: str) -> int:
    return sum(high - low for low, high in _DAILY[encoding])


def _is_mark(pair: int) -> bool:
    """True if a pair stands where all of these encodings have punctuation and signs."""
    return 0x8140 <= pair <= 0x824F or 0xA1A1 <= pair <= 0xA3FE


def _decoded(sample: bytes, encoding: str) -> str | None:
    try:
        return codecs.getincrementaldecoder(encoding)().decode(sample)  # the last character may be cut
    except UnicodeDecodeError:
        return None


def _share(sample: bytes, encoding: str, frequent: str) -> float:
    """How much of the text beyond ASCII is among the frequent characters; 0 where it cannot be read."""
    beyond = [character for character in _decoded(sample, encoding) or "" if not character.isascii()]
    return sum(character in frequent for character in beyond) / len(beyond) if beyond else 0.0

"""A text that is not UTF-8 is refused by the name of its encoding."""

import codecs
import json

import pytest

from tightfit.errors import DataError
from tightfit.training.data.corpus import read_documents, read_text
from tightfit.training.data.encodings import probable_encoding

TEXTS = {
    "zh": "今天的天气很好，我们在公园里散步。他说这是一个不大的地方，来的人也不多，可是大家都很高兴。",
    "zh-TW": "今天的天氣很好，我們在公園裡散步。他說這是一個不大的地方，來的人也不多，可是大家都很高興。",
    "ja": "今日はとても天気がいいので、公園を散歩しました。そこには多くの人がいて、みんな楽しそうでした。",
    "ko": "오늘은 날씨가 매우 좋아서 우리는 공원에서 산책을 하였다. 그곳에는 많은 사람이 있었고 모두 즐거워하였다.",
    "ru": "Сегодня очень хорошая погода, и мы гуляли в парке. Там было много людей, и все они были рады.",
    "de": "Über den Flüssen läßt sich schön träumen, und für müde Füße gibt es Bänke.",
}


@pytest.mark.parametrize(
    ("language", "encoding", "said"),
    [
        ("zh", "gbk", "GBK"),
        ("zh-TW", "big5", "BIG5"),
        ("ja", "shift_jis", "SHIFT_JIS"),
        ("ja", "euc_jp", "EUC-JP"),
        ("ko", "euc_kr", "EUC-KR"),
        ("ru", "cp1251", "WINDOWS-1251"),
        ("ru", "koi8_r", "KOI8-R"),
        ("de", "cp1252", "WINDOWS-1252"),
        ("zh", "utf-16", "UTF-16"),
    ],
)
def test_the_encoding_of_running_text_is_recognised_and_convertible_by_that_name(language, encoding, said):
    content = (TEXTS[language] * 3).encode(encoding)
    assert probable_encoding(content) == said
    assert codecs.lookup(said).name == codecs.lookup(encoding).name


TECHNICAL = {
    "zh": "参数说明\nbatch_size: 批次大小，默认值 32\nlearning_rate: 学习率 0.001\n显存不足时请减小批次，启用检查点",
    "zh-TW": "參數說明\nbatch_size: 批次大小，預設值 32\nlearning_rate: 學習率 0.001\n顯示記憶體不足時請減小批次",
    "ja": "パラメータ一覧\nbatch_size: バッチサイズ 32\nlearning_rate: 学習率 0.001\nメモリ不足時設定変更",
    "ko": "매개변수 설명\nbatch_size: 배치 크기 32\nlearning_rate: 학습률 0.001\n메모리 부족 시 배치 축소",
    "ru": "Параметры\nbatch_size: размер пакета 32\nlearning_rate: скорость обучения 0.001\nпамять исчерпана",
    "fr": "Paramètres\nbatch_size: taille de lot, défaut 32\nmémoire épuisée: réduire le lot à la moitié, déjà né",
}


@pytest.mark.parametrize(
    ("language", "encoding", "said"),
    [
        ("zh", "gbk", "GBK"),
        ("zh", "gb18030", "GBK"),
        ("zh-TW", "big5", "BIG5"),
        ("ja", "shift_jis", "SHIFT_JIS"),
        ("ja", "euc_jp", "EUC-JP"),
        ("ko", "euc_kr", "EUC-KR"),
        ("ru", "koi8_r", "KOI8-R"),
        ("ru", "cp1251", "WINDOWS-1251"),
        ("fr", "cp1252", "WINDOWS-1252"),
    ],
)
def test_a_technical_text_has_none_of_the_frequent_words_and_is_recognised_too(language, encoding, said):
    assert probable_encoding(TECHNICAL[language].encode(encoding)) == said


def test_bytes_that_are_no_text_have_no_encoding():
    assert probable_encoding(bytes(range(256)) * 8) is None
    assert probable_encoding(b"abc\xff") is None


def test_a_text_file_and_json_lines_in_gbk_are_refused_with_what_to_do(tmp_path):
    advice = "it is probably GBK: convert it with iconv -f GBK -t UTF-8, or remove it"
    (tmp_path / "a.txt").write_text(TEXTS["zh"], "gbk")
    with pytest.raises(DataError, match=advice):
        read_text(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": TEXTS["zh"]}, ensure_ascii=False), "gbk")
    with pytest.raises(DataError, match=f"a.jsonl, line 1, column 11: not UTF-8 text: .*{advice}"):
        list(read_documents(str(tmp_path / "a.jsonl")))

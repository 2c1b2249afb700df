"""A tokenizer for the tiny targets: one word per id, and a chat template."""

from tiny import VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


WORDS = ["<pad>", "<mask>", "user", "assistant", "<unk>"]
WORDS += [f"w{i}" for i in range(VOCAB - len(WORDS))]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}{% if thinking %}w9 {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", padding_side="left", chat_template=TEMPLATE
    )


def save_target(folder, target) -> None:
    """A target and its tokenizer, as `from_pretrained` loads them."""
    target.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)

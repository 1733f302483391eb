"""What a conversation is for models that only continue text: the messages, each on its own lines."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '\\n' }}{% endfor %}"

"""eml -> blocks: a mail's subject and its text; who wrote to whom is left out, attachments are counted."""

from __future__ import annotations

from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path

from sftplay.data.ingest.extract.document import Block, Extracted, Unreadable, heading
from sftplay.data.ingest.extract.markup.page import parse_page
from sftplay.data.ingest.extract.text.plain import split_plain

MOST_MAIL_BYTES = 64 << 20


def read_mail(path: Path, encoding: str) -> Extracted:
    """A mail's subject and blocks."""
    size = path.stat().st_size
    if size > MOST_MAIL_BYTES:
        raise Unreadable("too_large", f"{size >> 20} MiB; mails of up to {MOST_MAIL_BYTES >> 20} MiB are read")
    mail = message_from_bytes(path.read_bytes(), policy=policy.default)
    if any(part.get_content_type() == "application/pkcs7-mime" for part in mail.walk()):
        raise Unreadable("encrypted", "the mail is encrypted (S/MIME)")
    if mail.get_content_type() == "multipart/encrypted":
        raise Unreadable("encrypted", "the mail is encrypted (PGP)")
    subject = " ".join(str(mail.get("subject", "")).split())
    body = mail.get_body(preferencelist=("plain", "html"))
    blocks = _blocks(body) if isinstance(body, EmailMessage) else []
    if not blocks and isinstance(other := mail.get_body(preferencelist=("html",)), EmailMessage):
        blocks = _blocks(other)
    n_attachments = sum(part.is_attachment() for part in mail.walk() if isinstance(part, EmailMessage))
    notes = (f"attachments that are not read: {n_attachments}",) if n_attachments else ()
    head = [heading(subject, 1)] if subject and blocks else []
    return Extracted(subject or path.stem, (*head, *blocks), notes)


def _blocks(part: EmailMessage) -> list[Block]:
    """The blocks of one text of a mail."""
    data = part.get_payload(decode=True) or b""
    charset = part.get_content_charset() or "utf-8"
    try:
        text = bytes(data).decode(charset, "strict")
    except (LookupError, UnicodeDecodeError):
        raise Unreadable("encoding", f"the mail's text is not {charset}, which it names") from None
    if part.get_content_subtype() == "html":
        return parse_page(text)[1] if text.strip() else []
    return split_plain(text.replace("\r\n", "\n"))

//! The keys of a unary answer that matter to its usage, for both readers of such a body.

/// Returns true if a key in an answer has text under it.
pub(super) fn has_text_under(key: &[u8]) -> bool {
    is_text_key(&key[..key.len().min(KEPT_NAME_BYTES)], key.len())
}

/// Returns true if the key with this beginning and this length has text under it.
pub(super) fn is_text_key(start: &[u8], length: usize) -> bool {
    matches!(
        (start, length),
        (b"content" | b"text" | b"refusal" | b"input" | b"thinking", _)
            // Keys longer than the stored beginning are identified by beginning and length:
            // `arguments`, `reasoning` and `reasoning_content`.
            | (b"argument", 9)
            | (b"reasonin", 9 | 17)
    )
}

/// The number of bytes of a key that are stored to identify the key.
pub(super) const KEPT_NAME_BYTES: usize = 8;

/// The length in bytes of the two top-level keys that matter, `usage` and `error`.
pub(super) const KEY_BYTES: usize = 5;

/// The maximum length of a usage report in bytes. Real reports are under 1 KiB. A longer report is
/// not read, and the tokens are estimated.
pub(super) const MAX_USAGE_BYTES: usize = 16 * 1024;

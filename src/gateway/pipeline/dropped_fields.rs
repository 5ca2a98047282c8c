//! The response header that names what was left out of a request's body: whoever wonders why a field does nothing reads it there.

use crate::llm::request::{FieldChange, FieldChangeKind};

/// The header's name.
pub const NAME: &str = "x-cogni-dropped-fields";

/// The header's value: the names of what was dropped, and how many more there are than have room; `None` where nothing was,
/// without an allocation.
pub fn named(changes: &[FieldChange]) -> Option<Box<str>> {
    let dropped = || changes.iter().filter(|change| change.what == FieldChangeKind::Dropped);
    dropped().next()?;
    let mut text = String::new();
    for (number, change) in dropped().enumerate() {
        if text.len() + change.field.len() > MAX_BYTES {
            text.push_str(", and ");
            text.push_str(itoa::Buffer::new().format(dropped().count() - number));
            text.push_str(" more");
            break;
        }
        if number > 0 {
            text.push_str(", ");
        }
        text.push_str(&change.field);
    }
    Some(text.into())
}

/// Ours: all that a client of good faith sends, and a line that a person reads.
const MAX_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use super::{FieldChange, FieldChangeKind, named};
    use crate::llm::request::FieldChangeReason;

    #[test]
    fn what_is_dropped_is_named_within_bounds() {
        let change = |field: String, what| FieldChange {
            field: field.into(),
            what,
            why: FieldChangeReason::Unknown,
        };
        assert_eq!(named(&[change("model".into(), FieldChangeKind::Renamed)]), None);
        let two = ["user", "wibble"].map(|name| change(name.into(), FieldChangeKind::Dropped));
        assert_eq!(&*named(&two).unwrap(), "user, wibble");
        let many: Vec<_> =
            (0..256).map(|n| change(format!("{n:0>128}"), FieldChangeKind::Dropped)).collect();
        let named = named(&many).unwrap();
        assert!(named.len() < 600 && named.ends_with(", and 253 more"), "{named:?}");
    }
}

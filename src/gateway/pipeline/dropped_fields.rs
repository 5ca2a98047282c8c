//! The response header that names the fields dropped from a request's body.
//!
//! A developer whose field has no effect finds the field's name in this header.

use crate::llm::request::{FieldChange, FieldChangeKind};

/// The header's name.
pub const NAME: &str = "x-cogni-dropped-fields";

/// Returns the header's value: the names of the dropped fields, and the number of names that did not
/// fit.
///
/// Returns `None`, without an allocation, if no field was dropped.
pub fn named(changes: &[FieldChange]) -> Option<Box<str>> {
    let dropped = || changes.iter().filter(|change| change.what == FieldChangeKind::Dropped);
    dropped().next()?;
    let mut text = String::new();
    for (number, change) in dropped().enumerate() {
        // The check ignores the next separator and the tail with the number of further names. Both may
        // exceed the limit by a few bytes.
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

/// The limit of the header's names, in bytes. Our choice: enough for all fields of a well-meaning
/// client, and still a line that a person can read.
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

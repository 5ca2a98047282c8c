//! A strict JSON reader as the reference: `serde_json` for the syntax, and no duplicate key.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// Returns whether a strict reader accepts the body. Returns `None` if `serde_json` refuses a number because it does
/// not fit a float, which is not a fault of form.
pub(super) fn accepts_body(body: &[u8]) -> Option<bool> {
    match serde_json::from_slice::<TopLevel>(body) {
        Ok(_) => Some(true),
        Err(error) if error.to_string().starts_with("number out of range") => None,
        Err(_) => Some(false),
    }
}

/// An object that is read to its end.
struct TopLevel;

/// A value of any type that is read to its end.
struct StrictValue;

impl<'de> Deserialize<'de> for TopLevel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(StrictValue).map(|_| Self)
    }
}

impl<'de> Deserialize<'de> for StrictValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for StrictValue {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self, A::Error> {
        let mut keys = BTreeSet::new();
        while let Some((key, _)) = members.next_entry::<String, Self>()? {
            if !keys.insert(key) {
                return Err(de::Error::custom("duplicate key"));
            }
        }
        Ok(self)
    }
}

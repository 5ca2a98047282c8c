//! A value that must never be printed.

use std::fmt;

use ring::hmac;

/// A credential. `Debug` and `Display` show `***`; the value leaves only through [`Secret::expose`].
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself, for the one header or the one environment that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether somebody else has given the same value, in a time that does not tell how much of it is right. An empty
    /// secret is nobody's.
    ///
    /// ```
    /// use cogni_gateway::base::secret::Secret;
    ///
    /// assert!(Secret::new("open sesame").is("open sesame"));
    /// assert!(!Secret::new("").is(""));
    /// ```
    pub fn is(&self, given: &str) -> bool {
        // Tags are compared, which ring does in constant time, and whose bytes nobody can choose.
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"compare");
        let tag = hmac::sign(&key, self.0.as_bytes());
        hmac::verify(&key, given.as_bytes(), tag.as_ref()).is_ok() && !self.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl<'de> serde::Deserialize<'de> for Secret {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self)
    }
}

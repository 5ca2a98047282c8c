//! The signature of a request for AWS (Signature Version 4), over the bytes that are sent.
//!
//! AWS computes the same text from the request that it receives. So the text is made of the request as it is sent, and
//! nothing is changed in the request for it.

use std::time::SystemTime;

use http::{HeaderMap, HeaderName};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use ring::hmac;

use crate::base::digest::sha256_hex;
use crate::base::secret::SecretString;
use crate::base::timestamp::format_rfc3339_seconds;

/// The parts of a request that a signature covers.
#[derive(Clone, Copy, Debug)]
pub struct SignableRequest<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub path_encoding: PathEncoding,
    pub query: Option<&'a str>,
    /// The headers that the signature covers.
    pub headers: &'a HeaderMap,
    /// The SHA-256 of the body, or [`UNSIGNED_PAYLOAD`].
    pub payload: &'a str,
}

/// The form of the path in the text that is signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathEncoding {
    /// Each character has one escape at most, as S3 demands.
    Single,
    /// The escapes of the path are escaped again, as all other services demand.
    Double,
}

/// A key of AWS, and the service that it signs for.
#[derive(Clone, Copy, Debug)]
pub struct AwsSigner<'a> {
    pub access_key_id: &'a str,
    pub secret_access_key: &'a SecretString,
    pub region: &'a str,
    pub service: &'a str,
}

impl SignableRequest<'_> {
    /// Returns the canonical form of the request.
    pub fn to_canonical(&self) -> Vec<u8> {
        let path = match self.path_encoding {
            PathEncoding::Single => {
                encode(&percent_decode_str(self.path).collect::<Vec<_>>(), PATH)
            }
            PathEncoding::Double => encode(self.path.as_bytes(), PATH),
        };
        let query = canonical_query(self.query.unwrap_or_default());
        let mut text = format!("{}\n{path}\n{query}\n", self.method).into_bytes();
        for name in self.sorted_names() {
            text.extend_from_slice(name.as_str().as_bytes());
            text.push(b':');
            for (number, value) in self.headers.get_all(name).iter().enumerate() {
                if number > 0 {
                    text.push(b',');
                }
                push_trimmed(&mut text, value.as_bytes());
            }
            text.push(b'\n');
        }
        text.extend_from_slice(format!("\n{}\n{}", self.header_names(), self.payload).as_bytes());
        text
    }

    /// Returns the names of the headers that the signature covers, in the form of `SignedHeaders`.
    fn header_names(&self) -> String {
        self.sorted_names().iter().map(|name| name.as_str()).collect::<Vec<_>>().join(";")
    }

    fn sorted_names(&self) -> Vec<&HeaderName> {
        let mut names: Vec<_> = self.headers.keys().collect();
        names.sort_unstable_by_key(|name| name.as_str());
        names
    }
}

impl AwsSigner<'_> {
    /// Returns the value of `authorization` for a request. `date` is the value of its `x-amz-date`.
    pub fn authorize(&self, request: &SignableRequest<'_>, date: &str) -> String {
        let signature = self.sign_text(&self.string_to_sign(&request.to_canonical(), date), date);
        format!(
            "{ALGORITHM} Credential={}/{}, SignedHeaders={}, Signature={signature}",
            self.access_key_id,
            self.scope(date),
            request.header_names()
        )
    }

    /// Returns the text that is signed for the canonical form of a request.
    pub fn string_to_sign(&self, canonical: &[u8], date: &str) -> String {
        format!("{ALGORITHM}\n{date}\n{}\n{}", self.scope(date), sha256_hex(canonical))
    }

    /// Signs a text with a key that is made for the day, the region and the service.
    fn sign_text(&self, text: &str, date: &str) -> String {
        let secret = format!("AWS4{}", self.secret_access_key.expose_secret());
        let mut key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        for part in [day_of(date), self.region, self.service, TERMINATOR] {
            key = hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&key, part.as_bytes()).as_ref());
        }
        hex::encode(hmac::sign(&key, text.as_bytes()))
    }

    fn scope(&self, date: &str) -> String {
        format!("{}/{}/{}/{TERMINATOR}", day_of(date), self.region, self.service)
    }
}

/// Formats a time for `x-amz-date`, such as `20150830T123600Z`.
pub fn format_amz_date(time: SystemTime) -> String {
    format_rfc3339_seconds(time).to_string().replace(['-', ':'], "")
}

fn day_of(date: &str) -> &str {
    date.split('T').next().unwrap_or_default()
}

/// Returns the parameters of a query in their order by name and value, each with the escapes that AWS gives it.
fn canonical_query(query: &str) -> String {
    // AWS reads a plus sign as a space, like a form.
    let recode = |text: &str| {
        let text = text.replace('+', " ");
        encode(&percent_decode_str(&text).collect::<Vec<_>>(), PARAMETER)
    };
    let parameters = query.split('&').filter(|parameter| !parameter.is_empty());
    let mut parameters: Vec<_> = parameters
        .map(|parameter| {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            (recode(name), recode(value))
        })
        .collect();
    parameters.sort_unstable();
    let joined = parameters.iter().map(|(name, value)| format!("{name}={value}"));
    joined.collect::<Vec<_>>().join("&")
}

fn encode(text: &[u8], escaped: &'static AsciiSet) -> String {
    percent_encode(text, escaped).to_string()
}

/// Appends the value of a header without spaces at its ends, and with one space instead of several.
fn push_trimmed(text: &mut Vec<u8>, value: &[u8]) {
    let words = value.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    for (number, word) in words.enumerate() {
        if number > 0 {
            text.push(b' ');
        }
        text.extend_from_slice(word);
    }
}

/// The digest of a body that is not signed. Only S3 takes it, over TLS.
pub const UNSIGNED_PAYLOAD: &str = "UNSIGNED-PAYLOAD";

const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// The end of every scope.
const TERMINATOR: &str = "aws4_request";

/// The characters of a parameter that have an escape: all but those that RFC 3986 calls unreserved.
const PARAMETER: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The characters of a path that have an escape.
const PATH: &AsciiSet = &PARAMETER.remove(b'/');

//! Text as a part of a URL.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

/// Encodes text as one segment of a URL's path, or as one value of its query. A slash is encoded, too.
///
/// ```
/// # use cogni_gateway::base::url_component::encode_url_component;
/// assert_eq!(encode_url_component("feature/a b~1").to_string(), "feature%2Fa%20b~1");
/// ```
pub fn encode_url_component(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}

/// The ASCII characters that are not unreserved (RFC 3986, section 2.3).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

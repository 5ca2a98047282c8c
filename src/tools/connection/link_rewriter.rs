//! Replaces links to the run's connections in an answer by the addresses that the sandbox can reach.
//!
//! Indexes of packages link to their files with absolute addresses, which lead nowhere in a sandbox without a network.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use memchr::memmem;

/// A replacement of links in a body that passes frame by frame.
pub(super) struct LinkRewriter {
    links: Vec<RewrittenLink>,
    /// The end of the body so far, if a link may begin there.
    tail: Vec<u8>,
}

/// The address of a connection's server with a slash at its end, and the address in the sandbox.
#[derive(Clone, Debug)]
pub(super) struct RewrittenLink {
    pub(super) server: String,
    pub(super) sandbox: String,
}

impl LinkRewriter {
    /// Creates a rewriter for an answer with this status and these headers, and rewrites them. Returns `None` for a body
    /// that is no text with links, or a part of one: its range is one of the server's bytes.
    pub(super) fn rewrite_headers(
        links: Vec<RewrittenLink>,
        (status, headers): (StatusCode, &mut HeaderMap),
    ) -> Option<Self> {
        let rewriter = Self { links, tail: vec![] };
        // `link` has the addresses of the next pages.
        for name in [header::LOCATION, header::LINK] {
            let values: Vec<_> = headers.get_all(&name).iter().cloned().collect();
            headers.remove(&name);
            for value in values {
                let rewritten = HeaderValue::from_bytes(&rewriter.rewrite_links(value.as_bytes()));
                headers.append(&name, rewritten.unwrap_or(value));
            }
        }
        let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?.to_ascii_lowercase();
        let essence = kind.split(';').next().unwrap_or_default().trim();
        let is_text = TEXT_TYPES.contains(&essence)
            || essence.ends_with("+json")
            || essence.ends_with("+html");
        let is_part = status == StatusCode::PARTIAL_CONTENT
            || status == StatusCode::RANGE_NOT_SATISFIABLE
            || headers.contains_key(header::CONTENT_RANGE);
        if !is_text || is_part || headers.contains_key(header::CONTENT_ENCODING) {
            return None;
        }
        // The length and the digests of the rewritten body are others.
        for name in
            ["content-length", "content-md5", "content-digest", "digest", "repr-digest", "etag"]
        {
            headers.remove(name);
        }
        Some(rewriter)
    }

    /// Returns the rewritten part of the body so far that no later frame can change.
    pub(super) fn rewrite_frame(&mut self, frame: &[u8]) -> Bytes {
        self.tail.extend_from_slice(frame);
        // The longest end that is the beginning of a link waits for the next frame.
        let held = self.links.iter().map(|link| begun_length(&self.tail, link.server.as_bytes()));
        let end = self.tail.len() - held.max().unwrap_or_default();
        let waiting = self.tail.split_off(end);
        let text = std::mem::replace(&mut self.tail, waiting);
        self.rewrite_links(&text).into()
    }

    /// Returns the rewritten bytes that were held back. The body has ended.
    pub(super) fn rewrite_rest(self) -> Bytes {
        self.rewrite_links(&self.tail).into()
    }

    fn rewrite_links(&self, text: &[u8]) -> Vec<u8> {
        let found = |link: &RewrittenLink, number: usize| -> Vec<(usize, usize)> {
            memmem::find_iter(text, link.server.as_bytes()).map(|at| (at, number)).collect()
        };
        let mut places: Vec<_> =
            self.links.iter().enumerate().flat_map(|(number, link)| found(link, number)).collect();
        // Of two links at one place, the longer one is meant: one address may begin another. Of two equal ones it is the
        // first one.
        let length = |number: usize| self.links[number].server.len();
        places.sort_unstable_by_key(|(at, number)| (*at, usize::MAX - length(*number), *number));
        let (mut rewritten, mut from) = (vec![], 0);
        for (at, number) in places {
            if at >= from {
                rewritten.extend_from_slice(&text[from..at]);
                rewritten.extend_from_slice(self.links[number].sandbox.as_bytes());
                from = at + length(number);
            }
        }
        rewritten.extend_from_slice(&text[from..]);
        rewritten
    }
}

/// Returns the number of bytes at the end of a text with which a link may begin.
fn begun_length(text: &[u8], link: &[u8]) -> usize {
    let longest = text.len().min(link.len() - 1);
    (1..=longest).rev().find(|length| text.ends_with(&link[..*length])).unwrap_or_default()
}

/// The types of texts with links, beside those that end with `+json` and `+html`.
const TEXT_TYPES: [&str; 3] = ["application/json", "text/html", "text/plain"];

#[cfg(test)]
mod tests {
    use super::*;

    fn rewriter() -> LinkRewriter {
        let link = |server: &str, name: &str| RewrittenLink {
            server: server.to_owned(),
            sandbox: format!("http://localhost:8080/connect/{name}/"),
        };
        let links = vec![link("https://a.example/", "a"), link("https://a.example/b/", "b")];
        LinkRewriter { links, tail: vec![] }
    }

    #[test]
    fn links_are_rewritten_however_the_body_is_cut() {
        let body = "x https://a.example/1 https://a.example/b/2 https://a.example https://a.exampl";
        let expected = "x http://localhost:8080/connect/a/1 http://localhost:8080/connect/b/2 https://a.example https://a.exampl";
        for size in 1..body.len() {
            let mut rewriter = rewriter();
            let mut passed = vec![];
            for frame in body.as_bytes().chunks(size) {
                passed.extend_from_slice(&rewriter.rewrite_frame(frame));
            }
            passed.extend_from_slice(&rewriter.rewrite_rest());
            assert_eq!(String::from_utf8(passed).unwrap(), expected, "frames of {size}");
        }
    }
}

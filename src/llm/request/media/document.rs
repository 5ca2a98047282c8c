//! Estimates the tokens of a document, from the number of its pages.
//!
//! The pages of a PDF are counted if they are stated openly. A writer can hide pages from a reader
//! that knows less of the format than a provider does: in compressed objects, behind escapes in
//! names, behind comments, or by one page that stands in several lists. A document with any of these
//! counts as unreadable. A doubtful object can only add pages to the count.

use std::collections::HashSet;

use memchr::memmem;

use super::Base64Decoder;

/// Returns the tokens of the document in `bytes`, or `None` if its pages cannot be counted.
pub(super) fn document_tokens<I: Iterator<Item = u8>>(bytes: &mut Base64Decoder<I>) -> Option<u64> {
    let document: Vec<u8> = bytes.by_ref().collect();
    let pages = if bytes.is_complete() { count_pages(&document)? } else { return None };
    Some(pages.saturating_mul(TOKENS_PER_PAGE).min(MAX_DOCUMENT_TOKENS))
}

/// Returns the number of pages of a PDF, if all pages are in the open.
fn count_pages(document: &[u8]) -> Option<u64> {
    // `/ObjStm` marks a compressed object stream, which can hide pages.
    if !document.starts_with(b"%PDF-") || memmem::find(document, b"/ObjStm").is_some() {
        return None;
    }
    let mut found = PageCounts::default();
    let mut rest = document;
    // The document alternates between objects, which are read, and stream contents, which are
    // skipped.
    while let Some(start) = memmem::find(rest, STREAM_KEYWORD) {
        found.read_objects(&rest[..start])?;
        let content = &rest[start + STREAM_KEYWORD.len()..];
        let end = memmem::find(content, END_STREAM_KEYWORD)?;
        // Another reader may find the stream's end elsewhere and read objects in this content.
        if memmem::find(&content[..end], b"obj").is_some() {
            return None;
        }
        rest = &content[end + END_STREAM_KEYWORD.len()..];
    }
    found.read_objects(rest)?;
    // A page that a later version of the document replaced is counted once too often. A stated
    // count above the found pages means that pages are hidden.
    (found.counted > 0 && found.counted <= found.pages).then_some(found.pages)
}

/// The facts about pages in a document's objects.
#[derive(Default)]
struct PageCounts {
    /// The number of objects that are pages.
    pages: u64,
    /// The largest page count that a list of pages states.
    counted: u64,
    /// The numbers of the objects that stand in a list of pages.
    listed: HashSet<u32>,
}

impl PageCounts {
    /// Reads the objects between two streams. Returns `None` if a construct could hide pages.
    fn read_objects(&mut self, objects: &[u8]) -> Option<()> {
        let mut rest = objects;
        while let Some(slash) = memchr::memchr(b'/', rest) {
            let (name, behind) = split_name(&rest[slash + 1..]);
            rest = behind;
            match name {
                // A `#` escape can spell any name, including `Type`.
                _ if name.contains(&b'#') => return None,
                b"Type" => {
                    let (kind, _) = split_name(rest.trim_ascii_start().strip_prefix(b"/")?);
                    self.pages += u64::from(kind == b"Page");
                }
                b"Kids" => rest = self.read_kids(rest)?,
                b"Count" => self.counted = self.counted.max(parse_count(rest)?),
                _ => (),
            }
        }
        Some(())
    }

    /// Reads a list of references, such as `[3 0 R 4 0 R]`, and returns the rest behind the list. Returns `None` for
    /// another notation, or if an object is listed twice: a provider reads such a page again each time.
    fn read_kids<'a>(&mut self, text: &'a [u8]) -> Option<&'a [u8]> {
        let list = text.trim_ascii_start().strip_prefix(b"[")?;
        let end = memchr::memchr(b']', list)?;
        let mut words = str::from_utf8(&list[..end]).ok()?.split_ascii_whitespace();
        while let Some(number) = words.next() {
            let is_reference = words.next()?.parse::<u32>().is_ok() && words.next()? == "R";
            if !is_reference || !self.listed.insert(number.parse().ok()?) {
                return None;
            }
        }
        Some(&list[end..])
    }
}

/// Splits a text into the PDF name at its start and the rest.
fn split_name(text: &[u8]) -> (&[u8], &[u8]) {
    let is_end = |byte: &u8| {
        matches!(
            byte,
            0..=b' ' | b'(' | b')' | b'<' | b'>' | b'[' | b']' | b'{' | b'}' | b'/' | b'%'
        )
    };
    text.split_at(text.iter().position(is_end).unwrap_or(text.len()))
}

/// Returns the number after a name, if it is a plain number. Returns `None` for a reference to
/// another object or for another notation.
fn parse_count(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    // Outlines have negative counts, which say nothing about pages; they count as zero.
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let length = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (number, behind) = digits.split_at(length);
    // A number that a further number follows is a reference such as `12 0 R`.
    let next = behind.trim_ascii_start().first();
    let is_whole = next.is_some_and(|next| matches!(next, b'/' | b'>'));
    let number = str::from_utf8(number).ok()?.parse().ok()?;
    is_whole.then_some(if digits.len() < text.len() { 0 } else { number })
}

const STREAM_KEYWORD: &[u8] = b"stream";
const END_STREAM_KEYWORD: &[u8] = b"endstream";

/// The tokens per page. Anthropic charges up to 3,000 tokens of text, or the page as an image.
const TOKENS_PER_PAGE: u64 = 3000;

/// The maximum number of tokens of a document. No model's context holds more.
const MAX_DOCUMENT_TOKENS: u64 = 1_000_000;

/// The tokens of a document whose pages are unknown: a hundred pages, as many as most providers
/// accept, of 2,000 tokens.
pub(super) const UNREADABLE_DOCUMENT_TOKENS: u64 = 200_000;

/// The maximum length of a document's text that is read to count pages, in bytes. A longer document
/// counts as unreadable.
pub(super) const MAX_DOCUMENT_BYTES_READ: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::base64::decode_string;
    use super::{count_pages, document_tokens};
    use crate::base::rope::ByteRope;
    use base64::prelude::*;

    fn pdf(kids: usize, more: &str) -> String {
        let list: String = (0..kids).map(|kid| (kid + 3).to_string() + " 0 R ").collect();
        let page =
            |kid: usize| format!("{} 0 obj\n<< /Type /Page /Parent 2 0 R >>\nendobj\n", kid + 3);
        let pages: String = (0..kids).map(page).collect();
        format!(
            "%PDF-1.4\n1 0 obj\n<</Type/Catalog/Pages 2 0 R>>\nendobj\n2 0 obj\n<</Type/Pages/Kids[{list}]/Count {kids}>>\nendobj\n\
             {pages}99 0 obj\n<</Length 9>>\nstream\n/Count 77\nendstream\nendobj\n{more}trailer\n<</Root 1 0 R>>\n"
        )
    }

    /// G9: openly stated pages are counted.
    #[test]
    fn pages_in_the_open_are_counted() {
        for kids in [1, 2, 40, 300] {
            assert_eq!(count_pages(pdf(kids, "").as_bytes()), Some(kids as u64));
        }
        let outlines = "7 0 obj\n<</Type/Outlines/Count -3>>\nendobj\n";
        assert_eq!(count_pages(pdf(2, outlines).as_bytes()), Some(2));
        // A page of an earlier version counts in addition.
        let old = "8 0 obj<</Type/Page>>endobj\n";
        assert_eq!(count_pages(pdf(2, old).as_bytes()), Some(3));
    }

    /// G9: a document in which pages could be hidden counts as unreadable.
    #[test]
    fn pages_that_can_hide_are_not_counted() {
        for hidden in [
            "8 0 obj<</Type/ObjStm>>stream\nx\nendstream endobj",
            "8 0 obj<</T#79pe/Pages/Kids[3 0 R 3 0 R]/C#6funt 99>>endobj",
            "8 0 obj<</Type/Pages/Count 99>>endobj",
            "8 0 obj<</Type/Pages/Kids[9 0 R 9 0 R]/Count 1>>endobj",
            "8 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj",
            "8 0 obj<</Type/Pages/Kids 9 0 R/Count 1>>endobj",
            "8 0 obj<</Type/Pages/Kids[9 0 R%\n9 0 R]/Count 1>>endobj",
            "8 0 obj<</Type/Pages/Kids[9 0 R",
            "8 0 obj<</Type/Pages/Count%\n99>>endobj",
            "8 0 obj<</Type/Pages/Count 9 0 R>>endobj",
            "8 0 obj<</Type/Pages/Count 99.0>>endobj",
            "8 0 obj<</Type/Pages/Count +99>>endobj",
            "8 0 obj<</Type%\n/Page>>endobj",
            "8 0 obj<</Type 9 0 R>>endobj",
            "8 0 obj(stream)endobj 9 0 obj<</Type/Pages/Count 99>>endobj 10 0 obj(endstream)endobj",
            "8 0 obj<<>>stream\nno end",
            "/Count ",
            "/Count 1",
        ] {
            assert_eq!(count_pages(pdf(1, hidden).as_bytes()), None, "{hidden}");
        }
        for odd in
            ["", "%PDF-1.4", "PK\x03\x04", "%PDF-1.4\n/Type/Page", "%PDF-1.4\n/Type/Page/Count 0>>"]
        {
            assert_eq!(count_pages(odd.as_bytes()), None, "{odd}");
        }
    }

    /// G9: a document that is not read completely counts as unreadable.
    #[test]
    fn a_document_that_is_not_read_to_its_end_says_nothing() {
        let text = format!("{}\"", base64(pdf(1, "").as_bytes()));
        let rope: ByteRope = [text.clone().into_bytes().into()].into_iter().collect();
        let of = |most| document_tokens(&mut decode_string(&rope, 0, most));
        assert_eq!((of(text.len()), of(text.len() - 1)), (Some(3000), None));
    }

    fn base64(bytes: &[u8]) -> String {
        let mut text = String::new();
        BASE64_URL_SAFE_NO_PAD.encode_string(bytes, &mut text);
        text.replace('-', "+").replace('_', "/")
    }

    proptest! {
        /// G9: no insertion into a document lowers its page count, unless the document becomes unreadable.
        #[test]
        fn what_is_put_in_never_takes_a_page_away(
            kids in 1_usize..20,
            at in any::<prop::sample::Index>(),
            piece in prop::sample::select(vec!["%", " ", "/Type/Page", "/Count 1 ", "/Count 5>>", "stream\n", "\nendstream", "#", "/", "(", "x", "/Pages", "obj"]),
        ) {
            let document = pdf(kids, "");
            let at = at.index(document.len());
            let changed = [&document[..at], piece, &document[at..]].concat();
            let found = count_pages(changed.as_bytes());
            // The insertion may break the name of one page object, which lowers the count by one at most.
            prop_assert!(found.is_none_or(|found| found + 1 >= kids as u64), "{}: {:?}", changed, found);
        }
    }
}

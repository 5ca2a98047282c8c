//! Reads a document that is complete in memory, in one pass and without a state between frames.
//!
//! This reader is the fast path for usual bodies. If a body is invalid, or valid and unusual, the pass ends without a
//! result. A [`JsonScanner`](super::JsonScanner) then reads the body from its beginning and decides.
//!
//! **Invariant:** if this reader returns a document, a scanner returns the same document, and both send the same events
//! to their visitor in the same order.

use super::keys::JsonKeyBuffer;
use super::number::JsonNumberState;
use super::string::{self, JsonStringState};
use super::vector::{find_near_stop, find_stop};
use super::visitor::JsonStringPrefix;
use super::{JsonDocument, JsonKey, JsonLimits, JsonMember, JsonType, JsonVisitor, is_space};

/// Returns the document in `data`, and the visitor that received its events. Returns `None` if a scanner must read the
/// document.
pub fn read_whole<W: JsonVisitor>(
    limits: JsonLimits,
    data: &[u8],
    watch: W,
) -> Option<(JsonDocument, W)> {
    u32::try_from(data.len()).ok()?;
    let open = [WholeDocumentContainer { kind: JsonType::Object, first: 0 }; MAX_DEPTH];
    let mut pass = WholeDocumentScanner {
        limits,
        data,
        at: 0,
        depth: 0,
        open,
        keys: [(0, 0); MAX_LIVE_KEYS],
        live: 0,
        members: Vec::with_capacity(USUAL_MEMBERS),
        watch,
    };
    pass.read_document()?;
    Some((JsonDocument { members: pass.members }, pass.watch))
}

struct WholeDocumentScanner<'a, W> {
    limits: JsonLimits,
    data: &'a [u8],
    at: usize,
    /// The number of open containers in `open`.
    depth: usize,
    open: [WholeDocumentContainer; MAX_DEPTH],
    /// The positions and lengths of the live keys. Each open object owns a range; the innermost object owns the last
    /// range.
    keys: [(u32, u32); MAX_LIVE_KEYS],
    live: usize,
    /// The members so far. The last one may be incomplete.
    members: Vec<JsonMember>,
    watch: W,
}

#[derive(Clone, Copy)]
struct WholeDocumentContainer {
    kind: JsonType,
    /// The index of the container's first key.
    first: usize,
}

impl<W: JsonVisitor> WholeDocumentScanner<'_, W> {
    fn read_document(&mut self) -> Option<()> {
        self.skip_space();
        self.skip_byte(b'{')?;
        self.open_container(JsonType::Object)?;
        self.skip_space();
        // An empty object is rare in practice, so the slow path reads it.
        self.read_key()?;
        loop {
            // 1. Read a value. Of an array or object, only the beginning is read here.
            let kind = self.read_value()?;
            let is_open = matches!(kind, JsonType::Array | JsonType::Object);
            // 2. A container that is not empty continues with its first key or element.
            if is_open && !self.skip_container_end() {
                if kind == JsonType::Object {
                    self.read_key()?;
                }
                continue;
            }
            if !is_open {
                self.end_value();
            }
            // 3. Close containers up to a comma, or up to the end of the document.
            if self.continue_after_value()? {
                continue;
            }
            self.skip_space();
            return (self.at == self.data.len()).then_some(());
        }
    }

    /// Reads the bytes after a value: the ends of containers, up to a comma. Returns `false` after the end of the
    /// document.
    fn continue_after_value(&mut self) -> Option<bool> {
        loop {
            self.skip_space();
            if self.skip_byte(b',').is_some() {
                self.skip_space();
                if self.innermost_type() == JsonType::Object {
                    self.read_key()?;
                }
                return Some(true);
            }
            if !self.skip_container_end() {
                return None;
            }
            if self.depth == 0 {
                return Some(false);
            }
        }
    }

    /// Passes the end of the innermost array or object. Returns false if another byte is next.
    fn skip_container_end(&mut self) -> bool {
        let end = if self.innermost_type() == JsonType::Object { b'}' } else { b']' };
        if self.skip_byte(end).is_none() {
            return false;
        }
        self.watch.on_close();
        self.depth -= 1;
        self.live = self.open[self.depth].first;
        self.end_value();
        true
    }

    /// Reads a key, and passes the colon and white space behind it. Returns `None` if the object has the key already,
    /// or if the key has an escape or is longer than [`JsonKey::MAX_BYTES`].
    fn read_key(&mut self) -> Option<()> {
        let start = self.at;
        self.skip_byte(b'"')?;
        let rest = &self.data[self.at..];
        // Most keys are short: search the first bytes alone.
        let key = &rest[..find_near_stop(rest).or_else(|| find_stop(rest))?];
        self.at += key.len();
        self.skip_byte(b'"')?;
        let first = self.open[self.depth - 1].first;
        let place = (u32::try_from(start).ok()? + 1, u32::try_from(key.len()).ok()?);
        let is_known = |other: &(u32, u32)| {
            other.1 == place.1 && self.data[other.0 as usize..].starts_with(key)
        };
        if key.len() > JsonKey::MAX_BYTES || self.keys[first..self.live].iter().any(is_known) {
            return None;
        }
        // The key goes behind the keys of the outer objects. `skip_container_end` removes all keys of its object.
        *self.keys.get_mut(self.live)? = place;
        self.live += 1;
        self.watch.on_key(self.depth, key);
        if self.depth == 1 {
            if self.members.len() >= usize::from(self.limits.members) {
                return None;
            }
            self.members.push(JsonMember {
                key: JsonKey::from_short(key),
                start: start as u64,
                is_plain: true,
                ..JsonMember::default()
            });
        }
        self.skip_space();
        self.skip_byte(b':')?;
        self.skip_space();
        Some(())
    }

    /// Reads a value. Of an array or object it reads only the opening bracket and the white space behind that.
    fn read_value(&mut self) -> Option<JsonType> {
        let byte = *self.data.get(self.at)?;
        let kind = match byte {
            b'"' => JsonType::String,
            b'[' => JsonType::Array,
            b'{' => JsonType::Object,
            b't' | b'f' => JsonType::Bool,
            b'n' => JsonType::Null,
            _ => JsonType::Number,
        };
        let is_wanted = self.watch.on_value(self.depth, kind, self.at as u64);
        match (self.depth, self.members.last_mut()) {
            (1, Some(member)) => member.start_member(self.at as u64, kind),
            (2, Some(member)) if kind.counts_as_entry() => {
                member.entries = member.entries.saturating_add(1);
            }
            _ => (),
        }
        self.at += 1;
        match (kind, byte) {
            (JsonType::String, _) => self.read_string(is_wanted)?,
            (JsonType::Array | JsonType::Object, _) => {
                self.open_container(kind)?;
                self.skip_space();
            }
            (JsonType::Number, _) => self.read_number(byte)?,
            (_, b't') => self.read_literal(b"rue")?,
            (_, b'f') => self.read_literal(b"alse")?,
            _ => self.read_literal(b"ull")?,
        }
        Some(kind)
    }

    fn open_container(&mut self, kind: JsonType) -> Option<()> {
        if self.depth >= usize::from(self.limits.depth) {
            return None;
        }
        *self.open.get_mut(self.depth)? = WholeDocumentContainer { kind, first: self.live };
        self.depth += 1;
        Some(())
    }

    fn read_string(&mut self, is_wanted: bool) -> Option<()> {
        let rest = &self.data[self.at..];
        let length = string::string_length(rest)?;
        if is_wanted {
            let inside = &rest[..length];
            let beginning = &inside[..length.min(JsonStringPrefix::MAX_PREFIX_BYTES)];
            // A beginning of plain text without a blank in front is passed on as it is written. Any other beginning is
            // unescaped.
            let is_usual = beginning.first().is_none_or(u8::is_ascii_graphic)
                && find_stop(beginning).is_none();
            if is_usual {
                self.watch.on_string(beginning, false);
            } else {
                read_string_prefix(&rest[..=length], &mut self.watch)?;
            }
        }
        self.at += length + 1;
        Some(())
    }

    fn read_number(&mut self, first: u8) -> Option<()> {
        let mut number = JsonNumberState::start_number(first)?;
        while let Some(next) = self.data.get(self.at).and_then(|byte| number.next_state(*byte)) {
            number = next;
            self.at += 1;
        }
        number.is_complete().then_some(())
    }

    fn read_literal(&mut self, rest: &[u8]) -> Option<()> {
        let is_here = self.data[self.at..].starts_with(rest);
        self.at += rest.len();
        is_here.then_some(())
    }

    fn end_value(&mut self) {
        if self.depth == 1
            && let Some(member) = self.members.last_mut()
        {
            member.value.end = self.at as u64;
        }
    }

    fn innermost_type(&self) -> JsonType {
        self.open[self.depth - 1].kind
    }

    fn skip_space(&mut self) {
        while self.data.get(self.at).is_some_and(|byte| is_space(*byte)) {
            self.at += 1;
        }
    }

    fn skip_byte(&mut self, byte: u8) -> Option<()> {
        if self.data.get(self.at) != Some(&byte) {
            return None;
        }
        self.at += 1;
        Some(())
    }
}

/// Sends the beginning of a string to the visitor, unescaped and without blanks in front. The string must end in
/// `data`.
fn read_string_prefix(data: &[u8], watch: &mut impl JsonVisitor) -> Option<()> {
    let (mut text, mut name, mut start) =
        (JsonStringState::default(), JsonKeyBuffer::default(), JsonStringPrefix::default());
    start.begin_string(&mut name);
    let mut at = 0;
    loop {
        let rest = &data[at..];
        let wanted = &rest[..rest.len().min(start.wanted_bytes(&name))];
        let (read, has_ended) = text.read_string(wanted, at as u64, Some(&mut name)).ok()?;
        start.trim_blanks(&mut name);
        if start.is_prefix_complete(&name, has_ended) {
            let had_blanks = start.has_blanks();
            watch.on_string(start.take_prefix(&name), had_blanks);
            return Some(());
        }
        at += read;
    }
}

/// The largest number of arrays and objects inside one another. Our choice: a part of a tool result in a message has
/// depth seven, and the schema of a tool may nest as deep again.
const MAX_DEPTH: usize = 24;

/// The largest number of keys that are live at one time. Our choice: it is enough for tool schemas with many
/// properties.
const MAX_LIVE_KEYS: usize = 96;

/// The number of members for which memory is reserved; usual bodies have no more.
const USUAL_MEMBERS: usize = 8;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::read_whole;
    use crate::base::json::{JsonLimits, JsonScanner, JsonType, JsonVisitor};

    /// Records every event, and wants some of the texts.
    #[derive(Default, Debug, PartialEq, Eq)]
    struct Notes(Vec<String>);

    impl JsonVisitor for Notes {
        fn on_key(&mut self, depth: usize, key: &[u8]) {
            self.0.push(format!("{depth} {}", key.escape_ascii()));
        }

        fn on_value(&mut self, depth: usize, kind: JsonType, at: u64) -> bool {
            self.0.push(format!("{depth} {kind:?} {at}"));
            kind == JsonType::String && !self.0.len().is_multiple_of(3)
        }

        fn on_string(&mut self, start: &[u8], had_blanks: bool) {
            self.0.push(format!("{had_blanks} {}", start.escape_ascii()));
        }

        fn on_close(&mut self) {
            self.0.push("close".to_owned());
        }
    }

    fn check(body: &[u8]) -> bool {
        let mut scanner = JsonScanner::with_visitor(JsonLimits::default(), Notes::default());
        let fed = scanner.feed_frame(body).and_then(|()| scanner.finish_with_visitor());
        let whole = read_whole(JsonLimits::default(), body, Notes::default());
        if let Some(whole) = &whole {
            assert_eq!(fed.as_ref(), Ok(whole), "{}", body.escape_ascii());
        }
        whole.is_some()
    }

    /// G5: the requests of real clients are read in one pass, with the same result as a scanner's.
    #[test]
    fn what_clients_send_is_read_in_one_pass() {
        for client in
            ["anthropic_messages", "claude_code", "codex", "openai_chat", "openai_responses", "pi"]
        {
            let file = std::fs::read(format!("tests/fixtures/clients/{client}.json")).unwrap();
            let body = file.trim_ascii();
            assert!(check(body), "{client}");
            // The results are also the same if the body is cut at any byte, or if one byte is changed.
            for at in 0..body.len() {
                check(&body[..at]);
                let mut changed = body.to_vec();
                changed[at] = b"\"\\{}[],: 0tn\n\x80"[at % 14];
                check(&changed);
            }
        }
        let texts = [
            "",
            " ",
            "\\u0020 x",
            "\\n",
            "é",
            "\u{feff}x",
            "\u{7f}x",
            &"x".repeat(60),
            &"é".repeat(70),
        ];
        for text in texts {
            assert!(
                check(format!(r#"{{"a":"{text}","b":["{text}","{text}"]}}"#).as_bytes()),
                "{text}"
            );
        }
    }

    fn text() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "\\",
            " ",
            "\n",
            "a",
            "\"a\"",
            "\"b\":",
            "\"\":",
            "1",
            "-0.5e3",
            "true",
            "null",
            "\\u00e9",
            "\\ud83d",
            "é",
            "\"  text\"",
            "\"\\ttext of more than sixty bytes, which is as much as is kept of it\"",
        ]);
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_answers_as_a_scanner_or_not_at_all(noise in text(), value in text()) {
            check(noise.as_bytes());
            check(format!("{{\"a\":{noise}}}").as_bytes());
            check(format!("{{\"a\":\"{noise}\",\"b\":[{value}],\"c\":{{\"d\":{value}}}}}").as_bytes());
        }
    }
}

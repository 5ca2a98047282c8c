//! A body that is still being changed: changes are noted here and made at the end, all at once.
//!
//! A member leaves with the comma that goes with it, so whatever is dropped, what remains is JSON. The
//! payload is not touched: an edit names bytes by their offsets, and [`ByteRope::apply_edits`] cuts around it.
//!
//! **Invariant:** one member stays, as every body that is sent names a model; it is what added ones
//! follow.

use std::ops::Range;

use bytes::Bytes;

use super::field::MAX_INSPECTED_BYTES;
use crate::base::json::{JsonDocument, JsonLimits, JsonMember, JsonScanner};
use crate::base::rope::{ByteRope, SplicedBytes};

/// Bytes to be replaced, and by what.
pub(super) type ByteEdit = (Range<u64>, Bytes);

/// A body as it was received, and what is to become of it.
#[derive(Debug, Default)]
pub(super) struct BodyEditor {
    rope: ByteRope,
    members: Vec<JsonMember>,
    /// Members that go, by index.
    dropped: Vec<usize>,
    /// Changes within members that stay; no two overlap.
    edits: Vec<ByteEdit>,
    /// Members that come to the end, by name, each with the comma before it.
    added: [Option<(&'static str, Bytes)>; MAX_ADDED],
}

impl BodyEditor {
    pub(super) fn new(rope: ByteRope, document: JsonDocument) -> Self {
        Self { rope, members: document.members, ..Self::default() }
    }

    pub(super) fn members(&self) -> &[JsonMember] {
        &self.members
    }

    /// The value of a member, as it was received.
    pub(super) fn member_value(&self, at: usize) -> Bytes {
        self.rope.copy_range(self.members[at].value.clone())
    }

    /// The value of a member, where it stands in the first frame.
    pub(super) fn peek_value(&self, at: usize) -> Option<&[u8]> {
        self.rope.peek_range(self.members[at].value.clone())
    }

    /// Bytes of the body, as they were received.
    pub(super) fn bytes_in(&self, range: Range<u64>) -> Bytes {
        self.rope.copy_range(range)
    }

    /// What stands in a short object; its offsets begin at the object.
    pub(super) fn parse_object(&self, object: &Range<u64>) -> Option<JsonDocument> {
        if object.end - object.start > MAX_INSPECTED_BYTES {
            return None;
        }
        let mut scanner = JsonScanner::new(JsonLimits::default());
        scanner.feed_frame(&self.rope.copy_range(object.clone())).ok()?;
        scanner.finish_document().ok()
    }

    /// Takes a member out.
    pub(super) fn drop_member(&mut self, at: usize) {
        if !self.dropped.contains(&at) {
            self.dropped.push(at);
        }
    }

    /// Puts other bytes in the place of a member's value.
    pub(super) fn set_value(&mut self, at: usize, text: Bytes) {
        self.replace_range(self.members[at].value.clone(), text);
    }

    /// Puts other bytes in the place of some; what was put within them before is forgotten.
    pub(super) fn replace_range(&mut self, range: Range<u64>, text: Bytes) {
        self.edits.retain(|(other, _)| other.start < range.start || range.end < other.end);
        self.edits.push((range, text));
    }

    /// Adds a member at the end, or another value to one that was added before. `text` is the whole
    /// member with the comma before it.
    pub(super) fn add_member(&mut self, name: &'static str, text: Bytes) {
        let is_its = |place: &&mut Option<(&str, Bytes)>| {
            place.as_ref().is_none_or(|(added, _)| *added == name)
        };
        let place = self.added.iter_mut().find(is_its);
        *place.expect("there is a place for each name that we add") = Some((name, text));
    }

    /// The body with all changes made.
    pub(super) fn into_body(mut self) -> SplicedBytes {
        if self.edits.is_empty() && self.dropped.is_empty() && self.added[0].is_none() {
            return SplicedBytes::new(self.rope, vec![]);
        }
        self.remove_members();
        let (Some(kept), Some(last)) = (self.last_kept_member(), self.members.last()) else {
            return SplicedBytes::new(self.rope, vec![]);
        };
        // What stands after the last member that stays goes, and what comes is put there.
        let mut tail = self.members[kept].value.end..last.value.end;
        for (_, text) in self.added.into_iter().flatten() {
            let end = tail.end;
            self.edits.push((tail, text));
            tail = end..end;
        }
        if !tail.is_empty() {
            self.edits.push((tail, Bytes::new()));
        }
        // Stable: where two begin at one place, they stay in this order.
        self.edits.sort_by_key(|(range, _)| range.start);
        SplicedBytes::new(self.rope, self.edits)
    }

    /// Edits for the dropped members that others follow: each goes with the comma behind it.
    fn remove_members(&mut self) {
        let Some(kept) = self.last_kept_member() else { return };
        for at in &self.dropped {
            let member = &self.members[*at];
            self.edits.retain(|(edit, _)| edit.start < member.start || member.value.end < edit.end);
            if *at < kept {
                self.edits.push((member.start..self.members[at + 1].start, Bytes::new()));
            }
        }
    }

    fn last_kept_member(&self) -> Option<usize> {
        (0..self.members.len()).rev().find(|at| !self.dropped.contains(at))
    }
}

/// `store`, `stream_options`, and the field that limits the output.
const MAX_ADDED: usize = 3;

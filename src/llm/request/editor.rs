//! A body with pending changes: changes are recorded here and applied together at the end.
//!
//! A dropped member leaves with its comma, so the remaining text is JSON whatever is dropped.
//! Recording a change does not touch the payload: an edit names bytes by their offsets, and
//! [`ByteRope::apply_edits`] cuts around them.
//!
//! **Invariant:** at least one member remains, because every body that is sent names a model. Added
//! members follow the last remaining member.

use std::ops::Range;

use bytes::Bytes;

use crate::base::json::{JsonDocument, JsonLimits, JsonMember, JsonScanner};
use crate::base::rope::{ByteRope, SplicedBytes};

/// A range of bytes to replace, and the replacement.
pub(super) type ByteEdit = (Range<u64>, Bytes);

/// A body as received, and the changes to apply to it.
#[derive(Debug, Default)]
pub(super) struct BodyEditor {
    rope: ByteRope,
    members: Vec<JsonMember>,
    /// The indexes of the members to drop.
    dropped: Vec<usize>,
    /// Changes within the remaining members. No two changes overlap.
    edits: Vec<ByteEdit>,
    /// Members to append, by name. Each text includes the comma before the member.
    added: [Option<(&'static str, Bytes)>; MAX_ADDED],
}

impl BodyEditor {
    pub(super) fn new(rope: ByteRope, document: JsonDocument) -> Self {
        Self { rope, members: document.members, ..Self::default() }
    }

    pub(super) fn members(&self) -> &[JsonMember] {
        &self.members
    }

    /// Returns a copy of a member's value, as received.
    pub(super) fn member_value(&self, at: usize) -> Bytes {
        self.rope.copy_range(self.members[at].value.clone())
    }

    /// Returns a member's value without a copy, if the value lies in the first frame.
    pub(super) fn peek_value(&self, at: usize) -> Option<&[u8]> {
        self.rope.peek_range(self.members[at].value.clone())
    }

    /// Returns a copy of a range of the body, as received.
    pub(super) fn bytes_in(&self, range: Range<u64>) -> Bytes {
        self.rope.copy_range(range)
    }

    /// Parses a short object of the body. Offsets in the result count from the object's start.
    /// Returns `None` if the object is longer than [`MAX_INSPECTED_BYTES`] or is not valid JSON.
    pub(super) fn parse_object(&self, object: &Range<u64>) -> Option<JsonDocument> {
        if object.end - object.start > MAX_INSPECTED_BYTES {
            return None;
        }
        let mut scanner = JsonScanner::new(JsonLimits::default());
        scanner.feed_frame(&self.rope.copy_range(object.clone())).ok()?;
        scanner.finish_document().ok()
    }

    /// Marks a member as dropped.
    pub(super) fn drop_member(&mut self, at: usize) {
        if !self.dropped.contains(&at) {
            self.dropped.push(at);
        }
    }

    /// Replaces the bytes of a member's value.
    pub(super) fn set_value(&mut self, at: usize, text: Bytes) {
        self.replace_range(self.members[at].value.clone(), text);
    }

    /// Replaces a range of bytes. Earlier replacements inside the range are discarded.
    pub(super) fn replace_range(&mut self, range: Range<u64>, text: Bytes) {
        // An edit that lies wholly inside the new range would overlap with the new edit.
        self.edits.retain(|(other, _)| other.start < range.start || range.end < other.end);
        self.edits.push((range, text));
    }

    /// Appends a member, or changes the text of a member that was appended before. `text` is the
    /// whole member with the comma before it.
    pub(super) fn add_member(&mut self, name: &'static str, text: Bytes) {
        // An entry matches if it is free or holds the same name, so a second call overwrites the
        // first.
        let is_its = |place: &&mut Option<(&str, Bytes)>| {
            place.as_ref().is_none_or(|(added, _)| *added == name)
        };
        let place = self.added.iter_mut().find(is_its);
        *place.expect("there is a place for each name that we add") = Some((name, text));
    }

    /// Returns the body with all changes applied.
    pub(super) fn into_body(mut self) -> SplicedBytes {
        if self.edits.is_empty() && self.dropped.is_empty() && self.added[0].is_none() {
            return SplicedBytes::new(self.rope, vec![]);
        }
        // The order matters: 1. the dropped members become edits; 2. one edit removes the tail
        // behind the last remaining member and takes the first appended member; 3. further appended
        // members follow at the same end.
        self.remove_members();
        let (Some(kept), Some(last)) = (self.last_kept_member(), self.members.last()) else {
            return SplicedBytes::new(self.rope, vec![]);
        };
        // The tail is everything after the last remaining member, up to the end of the last
        // received member. The tail's replacement is the first appended member, or nothing.
        let mut tail = self.members[kept].value.end..last.value.end;
        // An empty range keeps the next appended member behind the previous one.
        for (_, text) in self.added.into_iter().flatten() {
            let end = tail.end;
            self.edits.push((tail, text));
            tail = end..end;
        }
        if !tail.is_empty() {
            self.edits.push((tail, Bytes::new()));
        }
        // The sort is stable: edits that begin at the same offset keep their order of insertion.
        self.edits.sort_by_key(|(range, _)| range.start);
        SplicedBytes::new(self.rope, self.edits)
    }

    /// Adds an edit for each dropped member that a remaining member follows. The edit removes the
    /// member and the comma behind it.
    fn remove_members(&mut self) {
        let Some(kept) = self.last_kept_member() else { return };
        for at in &self.dropped {
            let member = &self.members[*at];
            // The whole member is removed, so edits inside the member would overlap with the
            // removal.
            self.edits.retain(|(edit, _)| edit.start < member.start || member.value.end < edit.end);
            // Dropped members behind `kept` are part of the tail, which `into_body` removes at
            // once.
            if *at < kept {
                self.edits.push((member.start..self.members[at + 1].start, Bytes::new()));
            }
        }
    }

    fn last_kept_member(&self) -> Option<usize> {
        (0..self.members.len()).rev().find(|at| !self.dropped.contains(at))
    }
}

/// The maximum number of appended members: `store`, `stream_options`, and the field that limits the
/// output.
const MAX_ADDED: usize = 3;

/// The maximum length of a value that admission parses, in bytes. Our choice: a model's name
/// written entirely in escapes takes 1,538.
pub(super) const MAX_INSPECTED_BYTES: u64 = 4096;

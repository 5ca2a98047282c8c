//! The relay's sections in a pull request's text: one for each run, between marks that the page does not show.
//!
//! ```text
//! <!-- cogni:run run-7 -->
//! …
//! <!-- /cogni -->
//! ```

use std::borrow::Cow;

/// Returns the text with the run's section in it. The section replaces the run's earlier one, or follows the last
/// section, or is at the end. Returns `None` if there is no room beside the text that people wrote.
///
/// If there are too many sections, or too little room, sections of the oldest runs give way. The headline below
/// [`NOTICE_MARK`] stays, and only the list below it gives way.
pub fn upsert_section(text: Option<&str>, run: &str, words: &str) -> Option<String> {
    let mut pieces = parse_sections(text.unwrap_or_default());
    let mark = format!("{RUN_MARK}{run}{MARK_END}");
    let part = format!("{mark}\n{words}\n{END_MARK}");
    let is_own = |piece: &DescriptionPart<'_>| matches!(piece, DescriptionPart::Managed(old) if old.starts_with(&mark));
    let own_section = match pieces.iter().position(is_own) {
        Some(own_section) => {
            pieces[own_section] = DescriptionPart::Managed(part.into());
            own_section
        }
        None => add_section(&mut pieces, part),
    };
    fit_sections(pieces, own_section)
}

/// Returns true if another run's section has a review notice.
pub fn has_notice_of_other_run(text: Option<&str>, run: &str) -> bool {
    let mark = format!("{RUN_MARK}{run}{MARK_END}");
    let is_it = |piece: &DescriptionPart<'_>| matches!(piece, DescriptionPart::Managed(part) if part.contains(NOTICE_MARK) && !part.starts_with(&mark));
    parse_sections(text.unwrap_or_default()).iter().any(is_it)
}

/// Returns true if the run's own section has a review notice.
pub fn has_notice_of_run(text: Option<&str>, run: &str) -> bool {
    let mark = format!("{RUN_MARK}{run}{MARK_END}");
    let is_it = |piece: &DescriptionPart<'_>| matches!(piece, DescriptionPart::Managed(part) if part.contains(NOTICE_MARK) && part.starts_with(&mark));
    parse_sections(text.unwrap_or_default()).iter().any(is_it)
}

/// A part of a pull request's text.
enum DescriptionPart<'a> {
    User(&'a str),
    /// A section of the relay's, with its marks.
    Managed(Cow<'a, str>),
}

impl DescriptionPart<'_> {
    fn text(&self) -> &str {
        match self {
            Self::User(text) => text,
            Self::Managed(text) => text,
        }
    }

    /// Returns the section with less text: first without the agent's text, then without the notice's list, but never
    /// without the notice's headline. A section without a notice is removed as a whole. Returns `None` if nothing can
    /// be removed.
    fn shrink(&self) -> Option<String> {
        let Self::Managed(text) = self else { return None };
        let Some((above, notice)) = text.split_once(NOTICE_MARK) else {
            return (!text.is_empty()).then(String::new);
        };
        let mark = above.lines().next().unwrap_or_default();
        let line = notice.trim_start().lines().next().unwrap_or_default();
        let less = [
            format!("{mark}\n{NOTICE_MARK}{notice}"),
            format!("{mark}\n{NOTICE_MARK}\n{line}\n{END_MARK}"),
        ];
        less.into_iter().find(|less| less.len() < text.len())
    }
}

/// Splits a text into sections and other text. A mark without its other half is other text.
fn parse_sections(text: &str) -> Vec<DescriptionPart<'_>> {
    let (mut pieces, mut read, mut open) = (vec![], 0, None);
    // Each mark is visited once, so that many marks without their other half cost no more than few.
    for (at, _) in text.match_indices(COMMENT_START) {
        let mark = &text[at..];
        if mark.starts_with(RUN_MARK) {
            open = Some(at);
        } else if mark.starts_with(END_MARK)
            && let Some(open) = open.take()
        {
            let end = at + END_MARK.len();
            pieces.push(DescriptionPart::User(&text[read..open]));
            pieces.push(DescriptionPart::Managed(text[open..end].into()));
            read = end;
        }
    }
    pieces.push(DescriptionPart::User(&text[read..]));
    pieces
}

/// Inserts a new section behind the last one, or at the end, and returns its index.
fn add_section(pieces: &mut Vec<DescriptionPart<'_>>, part: String) -> usize {
    let last = pieces.iter().rposition(|piece| matches!(piece, DescriptionPart::Managed(_)));
    let at = last.map_or(pieces.len(), |last| last + 1);
    let is_first = pieces[..at].iter().all(|piece| piece.text().is_empty());
    let gap = if is_first { "" } else { SECTION_GAP };
    pieces.insert(at, DescriptionPart::Managed(part.into()));
    pieces.insert(at, DescriptionPart::User(gap));
    at + 1
}

/// Joins the parts. Sections other than `own` give way, the oldest first, while the text is too long or has too many.
fn fit_sections(mut pieces: Vec<DescriptionPart<'_>>, own: usize) -> Option<String> {
    let length = |piece: &DescriptionPart<'_>| piece.text().chars().count();
    let mut characters: usize = pieces.iter().map(length).sum();
    let other_pieces = pieces.iter().enumerate().filter(|(at, _)| *at != own);
    let mut parts = other_pieces.filter(|(_, piece)| piece.shrink().is_some()).count();
    let mut oldest = 0;
    // Each round either shrinks the oldest section that can shrink, or goes to the next one. So the loop ends: at the
    // last part, `get_mut` returns `None`.
    while characters > MAX_BODY_CHARS || parts >= MAX_PARTS {
        let piece = pieces.get_mut(oldest)?;
        // The run's own section never shrinks: it is what the caller wants to publish.
        let Some(less) = piece.shrink().filter(|_| oldest != own) else {
            oldest += 1;
            continue;
        };
        characters -= length(piece);
        *piece = DescriptionPart::Managed(less.into());
        characters += length(piece);
        parts -= usize::from(piece.shrink().is_none());
    }
    Some(pieces.iter().map(DescriptionPart::text).collect())
}

/// The mark of a review notice. The headline behind it is never removed.
pub const NOTICE_MARK: &str = "<!-- cogni:review -->";

/// The beginning of every mark.
const COMMENT_START: &str = "<!-- ";
/// The beginning of a section's first mark; the run's ID follows.
const RUN_MARK: &str = "<!-- cogni:run ";
const MARK_END: &str = " -->";
const END_MARK: &str = "<!-- /cogni -->";
const SECTION_GAP: &str = "\n\n";

/// The longest text in characters. GitHub's own limit is 65,536.
const MAX_BODY_CHARS: usize = 65_000;

/// The most sections of a text. Our choice: more than people scroll through.
const MAX_PARTS: usize = 20;

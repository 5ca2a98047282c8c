//! The parts of a pull request's text that are the relay's: one for each run, between marks that are not shown.
//!
//! ```text
//! <!-- cogni:run run-7 -->
//! …
//! <!-- /cogni -->
//! ```

use std::borrow::Cow;

/// The text with the run's part in it: in place of what it had, or after the last part, or at the end. `None` where
/// there is no room for it beside what people wrote.
///
/// Parts of the longest past runs give way when there are too many, or too little room; but what one has to say below
/// [`NOTICE_MARK`] does not go, only what it has listed there.
pub fn upsert_section(text: Option<&str>, run: &str, words: &str) -> Option<String> {
    let mut pieces = parse_sections(text.unwrap_or_default());
    let mark = format!("{RUN_MARK}{run}{MARK_END}");
    let part = format!("{mark}\n{words}\n{END_MARK}");
    let is_own = |piece: &DescriptionPart<'_>| matches!(piece, DescriptionPart::Part(old) if old.starts_with(&mark));
    let own = match pieces.iter().position(is_own) {
        Some(own) => {
            pieces[own] = DescriptionPart::Part(part.into());
            own
        }
        None => add_section(&mut pieces, part),
    };
    fit_sections(pieces, own)
}

/// Whether another run's part says that somebody has to look.
pub fn has_notice_of_other_run(text: Option<&str>, run: &str) -> bool {
    let mark = format!("{RUN_MARK}{run}{MARK_END}");
    let is_it = |piece: &DescriptionPart<'_>| matches!(piece, DescriptionPart::Part(part) if part.contains(NOTICE_MARK) && !part.starts_with(&mark));
    parse_sections(text.unwrap_or_default()).iter().any(is_it)
}

/// Whether the run's own part says so.
pub fn has_notice_of_run(text: Option<&str>, run: &str) -> bool {
    let mark = format!("{RUN_MARK}{run}{MARK_END}");
    let is_it = |piece: &DescriptionPart<'_>| matches!(piece, DescriptionPart::Part(part) if part.contains(NOTICE_MARK) && part.starts_with(&mark));
    parse_sections(text.unwrap_or_default()).iter().any(is_it)
}

/// What a text is made of.
enum DescriptionPart<'a> {
    Foreign(&'a str),
    /// With its marks.
    Part(Cow<'a, str>),
}

impl DescriptionPart<'_> {
    fn text(&self) -> &str {
        match self {
            Self::Foreign(text) => text,
            Self::Part(text) => text,
        }
    }

    /// The part with less in it: first its words go, then what its notice lists, and its first line never. Without a
    /// notice it goes as a whole. `None` where nothing can go.
    fn shrink(&self) -> Option<String> {
        let Self::Part(text) = self else { return None };
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

/// Takes a text apart. A mark without its other half is nobody's part.
fn parse_sections(text: &str) -> Vec<DescriptionPart<'_>> {
    let (mut pieces, mut read, mut open) = (vec![], 0, None);
    // Each mark is seen once, so that many without their other half cost no more than few.
    for (at, _) in text.match_indices(COMMENT_START) {
        let mark = &text[at..];
        if mark.starts_with(RUN_MARK) {
            open = Some(at);
        } else if mark.starts_with(END_MARK)
            && let Some(open) = open.take()
        {
            let end = at + END_MARK.len();
            pieces.push(DescriptionPart::Foreign(&text[read..open]));
            pieces.push(DescriptionPart::Part(text[open..end].into()));
            read = end;
        }
    }
    pieces.push(DescriptionPart::Foreign(&text[read..]));
    pieces
}

/// Adds a part that was not there, and says where.
fn add_section(pieces: &mut Vec<DescriptionPart<'_>>, part: String) -> usize {
    let last = pieces.iter().rposition(|piece| matches!(piece, DescriptionPart::Part(_)));
    let at = last.map_or(pieces.len(), |last| last + 1);
    let is_first = pieces[..at].iter().all(|piece| piece.text().is_empty());
    let gap = if is_first { "" } else { SECTION_GAP };
    pieces.insert(at, DescriptionPart::Part(part.into()));
    pieces.insert(at, DescriptionPart::Foreign(gap));
    at + 1
}

/// Joins the pieces. Parts other than `own` give way from the oldest on, while there are too many of them.
fn fit_sections(mut pieces: Vec<DescriptionPart<'_>>, own: usize) -> Option<String> {
    let length = |piece: &DescriptionPart<'_>| piece.text().chars().count();
    let mut characters: usize = pieces.iter().map(length).sum();
    let others = pieces.iter().enumerate().filter(|(at, _)| *at != own);
    let mut parts = others.filter(|(_, piece)| piece.shrink().is_some()).count();
    let mut oldest = 0;
    while characters > MAX_BODY_CHARS || parts >= MAX_PARTS {
        let piece = pieces.get_mut(oldest)?;
        let Some(less) = piece.shrink().filter(|_| oldest != own) else {
            oldest += 1;
            continue;
        };
        characters -= length(piece);
        *piece = DescriptionPart::Part(less.into());
        characters += length(piece);
        parts -= usize::from(piece.shrink().is_none());
    }
    Some(pieces.iter().map(DescriptionPart::text).collect())
}

/// What follows it in a part is not to be lost.
pub const NOTICE_MARK: &str = "<!-- cogni:review -->";

/// Each mark begins so.
const COMMENT_START: &str = "<!-- ";
const RUN_MARK: &str = "<!-- cogni:run ";
const MARK_END: &str = " -->";
const END_MARK: &str = "<!-- /cogni -->";
const SECTION_GAP: &str = "\n\n";

/// GitHub's own bound is 65,536.
const MAX_BODY_CHARS: usize = 65_000;

/// Runs that a pull request tells of. Our choice: more than anybody scrolls through.
const MAX_PARTS: usize = 20;

//! The parts of a pull request's text that are the relay's: one for each run, between marks that are not shown.
//!
//! ```text
//! <!-- cogni:run run-7 -->
//! …
//! <!-- /cogni -->
//! ```

/// The text with the run's part in it: in place of what it had, or after the last part, or at the end. `None` where
/// there is no room for it beside what people wrote.
///
/// Parts of the longest past runs give way when there are too many, or too little room.
pub fn put(text: Option<&str>, run: &str, words: &str) -> Option<String> {
    let mut pieces = read(text.unwrap_or_default());
    let mark = format!("{OPEN}{run}{MARK_END}");
    let part = format!("{mark}\n{words}\n{CLOSE}");
    let is_own = |piece: &Piece<'_>| matches!(piece, Piece::Part(old) if old.starts_with(&mark));
    let own = match pieces.iter().position(is_own) {
        Some(own) => {
            pieces[own] = Piece::Part(&part);
            own
        }
        None => add(&mut pieces, &part),
    };
    trim(pieces, own)
}

/// What a text is made of.
#[derive(Clone, Copy)]
enum Piece<'a> {
    Foreign(&'a str),
    /// With its marks.
    Part(&'a str),
}

impl<'a> Piece<'a> {
    fn text(self) -> &'a str {
        match self {
            Self::Foreign(text) | Self::Part(text) => text,
        }
    }
}

/// Takes a text apart. A mark without its other half is nobody's part.
fn read(text: &str) -> Vec<Piece<'_>> {
    let mut pieces = vec![];
    let mut rest = text;
    let mut from = 0;
    while let Some(open) = rest[from..].find(OPEN).map(|at| from + at) {
        let inner = open + OPEN.len();
        let close = rest[inner..].find(CLOSE).map(|at| inner + at);
        let next = rest[inner..].find(OPEN).map(|at| inner + at);
        match close {
            Some(close) if next.is_none_or(|next| close < next) => {
                let end = close + CLOSE.len();
                pieces.push(Piece::Foreign(&rest[..open]));
                pieces.push(Piece::Part(&rest[open..end]));
                rest = &rest[end..];
                from = 0;
            }
            _ => from = inner,
        }
    }
    pieces.push(Piece::Foreign(rest));
    pieces
}

/// Adds a part that was not there, and says where.
fn add<'a>(pieces: &mut Vec<Piece<'a>>, part: &'a str) -> usize {
    let last = pieces.iter().rposition(|piece| matches!(piece, Piece::Part(_)));
    let at = last.map_or(pieces.len(), |last| last + 1);
    let is_first = pieces[..at].iter().all(|piece| piece.text().is_empty());
    let gap = if is_first { "" } else { GAP };
    pieces.insert(at, Piece::Part(part));
    pieces.insert(at, Piece::Foreign(gap));
    at + 1
}

/// Joins the pieces. Parts other than `own` give way from the oldest on, while there are too many of them.
fn trim(mut pieces: Vec<Piece<'_>>, own: usize) -> Option<String> {
    loop {
        let characters: usize = pieces.iter().map(|piece| piece.text().chars().count()).sum();
        let is_part = |piece: &Piece<'_>| matches!(piece, Piece::Part(text) if !text.is_empty());
        let parts = pieces.iter().filter(|piece| is_part(piece)).count();
        if characters <= MAX_CHARACTERS && parts <= MAX_PARTS {
            return Some(pieces.iter().map(|piece| piece.text()).collect());
        }
        let oldest = (0..pieces.len()).find(|&at| at != own && is_part(&pieces[at]))?;
        pieces[oldest] = Piece::Part("");
    }
}

const OPEN: &str = "<!-- cogni:run ";
const MARK_END: &str = " -->";
const CLOSE: &str = "<!-- /cogni -->";
const GAP: &str = "\n\n";

/// GitHub's own bound is 65,536.
const MAX_CHARACTERS: usize = 65_000;

/// Runs that a pull request tells of. Our choice: more than anybody scrolls through.
const MAX_PARTS: usize = 20;

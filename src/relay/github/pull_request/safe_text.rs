//! An agent's words, made harmless for a page that notifies people, closes issues and loads pictures.
//!
//! Each sign that would do something is parted from what follows by a zero-width space. It looks the same, whether in a
//! sentence or in code, and it also holds where a text of the page becomes a commit's message, as squashing does.
//!
//! What is parted: `@name` (which notifies), `#12` and `GH-12` (which refer, and after a word like `fixes`, close), such
//! a word before an address, `![` and every HTML tag and comment (which load pictures, hide text, or end our part), and
//! `&` before a name or a number and `\` before `-` and `:`, which would write one of these signs in another way.
//!
//! A block of code that is not ended is ended, so that what follows is not part of it.

/// A title: one line, of some length, and never none.
pub fn format_title(given: &str, otherwise: &str) -> String {
    let line: String =
        given.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().into();
    let line = neutralize_markup(&truncate(&line, MAX_TITLE_CHARS));
    if line.is_empty() { otherwise.to_owned() } else { line }
}

/// Some paragraphs, in the page's own language.
pub fn format_body(given: &str) -> String {
    close_code_block(&neutralize_markup(truncate(given, MAX_AGENT_TEXT_CHARS).trim()))
}

/// A name in a sentence of ours.
pub fn format_code(name: &str) -> String {
    format!("`{}`", neutralize_markup(name).replace('`', "'"))
}

fn neutralize_markup(given: &str) -> String {
    let given: String = given.chars().filter(|&c| is_printable(c)).collect();
    let mut text = String::with_capacity(given.len());
    for (at, c) in given.char_indices() {
        text.push(c);
        let (before, after) = given.split_at(at + c.len_utf8());
        if triggers_action(c, before, after) {
            text.push(ZERO_WIDTH_SPACE);
        }
    }
    text
}

/// The text with its last block of code ended.
///
/// A block that begins a few columns to the right may belong to an item of a list, which ends with that item, or to none.
/// It is moved to the first column, where it belongs to none.
fn close_code_block(given: &str) -> String {
    let (mut text, mut open) = (String::with_capacity(given.len()), None);
    for line in given.split_inclusive('\n') {
        match (open, parse_fence(line)) {
            (None, Some(fence)) if fence.may_begin() => {
                open = Some((fence.sign, fence.length));
                text.push_str(line.trim_start_matches(' '));
            }
            (Some((sign, length)), Some(fence)) if fence.may_end(sign, length) => {
                open = None;
                text.push_str(line);
            }
            _ => text.push_str(line),
        }
    }
    if let Some((sign, length)) = open {
        let gap = if text.ends_with('\n') { "" } else { "\n" };
        text.push_str(gap);
        text.extend(std::iter::repeat_n(sign, length));
    }
    text
}

/// A line that begins or ends a block of code.
struct CodeFence<'a> {
    sign: char,
    length: usize,
    /// What follows on the line.
    rest: &'a str,
}

fn parse_fence(line: &str) -> Option<CodeFence<'_>> {
    let marks = line.trim_start_matches(' ');
    let sign = marks.chars().next().filter(|sign| matches!(sign, '`' | '~'))?;
    let rest = marks.trim_start_matches(sign);
    let length = marks.len() - rest.len();
    let is_one = line.len() - marks.len() <= 3 && length >= 3;
    is_one.then(|| CodeFence { sign, length, rest: rest.trim_end_matches('\n') })
}

impl CodeFence<'_> {
    fn may_begin(&self) -> bool {
        self.sign == '~' || !self.rest.contains('`')
    }

    fn may_end(&self, sign: char, length: usize) -> bool {
        self.sign == sign && self.length >= length && self.rest.trim_matches([' ', '\t']).is_empty()
    }
}

/// Whether a character, the last one of `before`, does something together with what comes `after` it.
fn triggers_action(c: char, before: &str, after: &str) -> bool {
    let next = after.chars().next().unwrap_or_default();
    match c {
        '@' => next.is_ascii_alphanumeric(),
        '#' => next.is_ascii_digit(),
        '-' => next.is_ascii_digit() && ends_with_any(before, &["gh-"]),
        '!' => next == '[',
        '&' => next == '#' || next.is_ascii_alphabetic(),
        '\\' => matches!(next, '-' | ':'),
        '<' => next.is_ascii_alphabetic() || matches!(next, '/' | '!' | '?'),
        // In this order: who looks for an address goes through all blanks, and does so behind such a word only.
        _ => ends_with_any(before, CLOSING_KEYWORDS) && is_before_address(after),
    }
}

/// `: https://…`
fn is_before_address(text: &str) -> bool {
    let rest = text.strip_prefix(':').unwrap_or(text);
    let address = rest.trim_start();
    let starts = |scheme: &str| {
        address.get(..scheme.len()).is_some_and(|it| it.eq_ignore_ascii_case(scheme))
    };
    address.len() < rest.len() && (starts("http:") || starts("https:"))
}

fn ends_with_any(text: &str, words: &[&str]) -> bool {
    words.iter().any(|word| {
        let at = text.len().checked_sub(word.len());
        at.and_then(|at| text.get(at..)).is_some_and(|end| end.eq_ignore_ascii_case(word))
    })
}

/// Neither control characters nor those that reorder what stands around them.
fn is_printable(c: char) -> bool {
    let reorders =
        matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}');
    (!c.is_control() || matches!(c, '\n' | '\t')) && !reorders
}

fn truncate(text: &str, characters: usize) -> String {
    let mut kept: String = text.chars().take(characters).collect();
    if kept.len() < text.len() {
        kept.push('…');
    }
    kept
}

/// <https://docs.github.com/en/issues/tracking-your-work-with-issues/using-issues/linking-a-pull-request-to-an-issue>
const CLOSING_KEYWORDS: &[&str] =
    &["close", "closes", "closed", "fix", "fixes", "fixed", "resolve", "resolves", "resolved"];

/// A zero-width space.
const ZERO_WIDTH_SPACE: char = '\u{200b}';

/// GitHub allows 256; a sign takes two.
const MAX_TITLE_CHARS: usize = 120;

/// More than anybody reads; three of GitHub's pages of text hold twenty.
const MAX_AGENT_TEXT_CHARS: usize = 8_000;

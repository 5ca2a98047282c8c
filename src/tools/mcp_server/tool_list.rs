//! Reads a server's list of tools, page by page. A definition stays text until a caller wants it.
//!
//! A server is not trusted with this process's memory, and parsed JSON takes up to a hundred times the memory of its
//! text. So the bytes of all pages together are bounded, and a definition is parsed only if it has few values.

use std::borrow::Cow;
use std::fmt::{self, Formatter};

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::error::McpServerError;
use crate::base::json::check_small_document;

/// The rest of what a server may list.
pub(super) struct ToolListLimit {
    left_bytes: usize,
    left_pages: u32,
}

/// One page of a list of tools.
pub(super) struct ToolListPage<'a> {
    /// The tools' names and definitions.
    pub(super) tools: Vec<(Cow<'a, str>, &'a RawValue)>,
    pub(super) next_cursor: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMembers<'a> {
    #[serde(borrow)]
    tools: PageTools<'a>,
    next_cursor: Option<String>,
}

/// The definitions of a page, as the server wrote them. They are at most [`MAX_PAGE_TOOLS`].
struct PageTools<'a>(Vec<&'a RawValue>);

#[derive(Deserialize)]
struct ToolName<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
}

impl ToolListLimit {
    pub(super) fn new() -> Self {
        Self { left_bytes: MAX_LIST_BYTES, left_pages: MAX_PAGES }
    }

    /// Returns the largest number of bytes that the next page may have.
    ///
    /// # Errors
    /// Returns an error if the list has had as many pages as it may have.
    pub(super) fn next_page_bytes(&mut self) -> Result<usize, McpServerError> {
        let left = self.left_pages.checked_sub(1).ok_or(McpServerError::Malformed(ENDLESS))?;
        self.left_pages = left;
        Ok(self.left_bytes.min(MAX_PAGE_BYTES))
    }

    /// Reads a page, and takes its bytes off the rest.
    ///
    /// # Errors
    /// Returns an error if the page has another form, or too many tools.
    pub(super) fn read_page<'a>(
        &mut self,
        page: &'a str,
    ) -> Result<ToolListPage<'a>, McpServerError> {
        self.left_bytes = self.left_bytes.saturating_sub(page.len());
        let malformed = |_| McpServerError::Malformed("the list of tools");
        let page: PageMembers<'_> = serde_json::from_str(page).map_err(malformed)?;
        let tools = page.tools.0.into_iter().map(|definition| {
            let named = serde_json::from_str::<ToolName<'_>>(definition.get());
            let named = named.map_err(|_| McpServerError::Malformed("a tool's name"))?;
            Ok((named.name, definition))
        });
        let tools = tools.collect::<Result<_, McpServerError>>()?;
        Ok(ToolListPage { tools, next_cursor: page.next_cursor })
    }
}

/// Parses the definition of a tool. `left_values` is the number of values that may be parsed, and becomes smaller.
///
/// # Errors
/// Returns an error if the definition has too many values.
pub(super) fn parse_definition(
    definition: &RawValue,
    left_values: &mut u32,
) -> Result<Value, McpServerError> {
    let text = definition.get();
    let most = MAX_DEFINITION_VALUES.min(*left_values);
    let values = check_small_document(text.as_bytes(), most)
        .map_err(|_| McpServerError::Malformed("a tool's definition, which is too large"))?;
    *left_values -= values;
    serde_json::from_str(text).map_err(|_| McpServerError::Malformed("a tool's definition"))
}

impl<'de: 'a, 'a> Deserialize<'de> for PageTools<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ToolsVisitor;
        impl<'de> Visitor<'de> for ToolsVisitor {
            type Value = PageTools<'de>;

            fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
                f.write_str("a list of tools")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut tools = vec![];
                while let Some(tool) = items.next_element()? {
                    if tools.len() == MAX_PAGE_TOOLS {
                        return Err(A::Error::custom("too many tools"));
                    }
                    tools.push(tool);
                }
                Ok(PageTools(tools))
            }
        }
        deserializer.deserialize_seq(ToolsVisitor)
    }
}

/// The largest list of tools, in bytes of all its pages. Our choice: the largest known server lists 200 KiB.
const MAX_LIST_BYTES: usize = 4 * 1024 * 1024;

/// The largest page, in bytes. A page is in memory while it arrives, for each call that is open.
const MAX_PAGE_BYTES: usize = 1024 * 1024;

/// The most pages of a list of tools.
const MAX_PAGES: u32 = 32;

/// The most tools of a page. Our choice: the largest known server lists a few hundred.
const MAX_PAGE_TOOLS: usize = 4096;

/// The most values in the definition of a tool. Our choice: the definitions of known servers have some hundreds. Parsed,
/// so many values take at most 6 MiB.
const MAX_DEFINITION_VALUES: u32 = 8192;

/// The most values in the definitions that `tools lock` and `tools diff` keep of one server.
pub(super) const MAX_LIST_VALUES: u32 = 128 * 1024;

const ENDLESS: &str = "the list of tools, which has no end";

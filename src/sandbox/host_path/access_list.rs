//! The access control list of a file or a directory (acl(5)), which may grant or deny more than the mode shows.

use std::io;
use std::path::Path;

use rustix::io::Errno;

/// A list as the kernel stores it.
pub(super) struct AccessList {
    entries: Vec<AccessEntry>,
}

/// The permissions of one user, one group or one class.
struct AccessEntry {
    tag: u16,
    permissions: u32,
    id: u32,
}

/// A user and a group. `None` stands for a number that is not known, and is in no entry.
#[derive(Clone, Copy)]
pub(super) struct AccessIds {
    pub(super) user: Option<u32>,
    pub(super) group: Option<u32>,
}

impl AccessList {
    /// Reads the list of a path. Returns `None` if the path has only a mode.
    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let mut bytes = vec![0; MAX_LIST_BYTES];
        match rustix::fs::getxattr(path, ACL_XATTR, &mut bytes[..]) {
            Ok(length) => Self::parse(&bytes[..length]).map(Some).ok_or_else(|| {
                io::Error::other("its access control list has a form that is not known")
            }),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Parses a version, and then a tag, permissions and a number for each entry, all in little-endian order.
    fn parse(list: &[u8]) -> Option<Self> {
        let (version, entries) = list.split_first_chunk()?;
        let (entries, []) = entries.as_chunks::<ENTRY_BYTES>() else { return None };
        let entry = |[a, b, c, d, id @ ..]: &[u8; ENTRY_BYTES]| AccessEntry {
            tag: u16::from_le_bytes([*a, *b]),
            permissions: u16::from_le_bytes([*c, *d]).into(),
            id: u32::from_le_bytes(*id),
        };
        let is_known = u32::from_le_bytes(*version) == LIST_VERSION;
        is_known.then(|| Self { entries: entries.iter().map(entry).collect() })
    }

    /// Returns true if the list grants all of `requested` to `ids`, for a file of `owner`. The first class that fits
    /// decides: the owner, a named user, the groups, all others.
    pub(super) fn grants(&self, requested: u32, ids: AccessIds, owner: AccessIds) -> bool {
        let grants = |permissions: u32| permissions & requested == requested;
        if ids.user.is_some() && ids.user == owner.user {
            return grants(self.class(TAG_OWNER));
        }
        let is_named = |entry: &&AccessEntry| entry.tag == TAG_USER && ids.user == Some(entry.id);
        if let Some(named) = self.entries.iter().find(is_named) {
            return grants(named.permissions & self.mask());
        }
        let is_in_group = |entry: &&AccessEntry| match entry.tag {
            TAG_OWNING_GROUP => ids.group.is_some() && ids.group == owner.group,
            TAG_GROUP => ids.group == Some(entry.id),
            _ => false,
        };
        let mut groups = self.entries.iter().filter(is_in_group).peekable();
        if groups.peek().is_some() {
            return groups.any(|group| grants(group.permissions & self.mask()));
        }
        grants(self.class(TAG_OTHERS))
    }

    /// Returns true if the list names a user or a group for which `is_relevant_id` is true, and grants `requested` to
    /// it.
    pub(super) fn names(&self, requested: u32, is_relevant_id: impl Fn(u32) -> bool) -> bool {
        let mut named =
            self.entries.iter().filter(|entry| matches!(entry.tag, TAG_USER | TAG_GROUP));
        named.any(|entry| {
            is_relevant_id(entry.id) && entry.permissions & self.mask() & requested == requested
        })
    }

    fn class(&self, tag: u16) -> u32 {
        self.entries.iter().find(|entry| entry.tag == tag).map_or(0, |entry| entry.permissions)
    }

    /// Returns the most that named users and groups have. A list without names has no mask.
    fn mask(&self) -> u32 {
        let mask = self.entries.iter().find(|entry| entry.tag == TAG_MASK);
        mask.map_or(u32::MAX, |entry| entry.permissions)
    }
}

const ACL_XATTR: &str = "system.posix_acl_access";

/// The largest attribute of a file: the kernel's own limit.
const MAX_LIST_BYTES: usize = 64 << 10;

/// The kernel's only version.
const LIST_VERSION: u32 = 2;

const ENTRY_BYTES: usize = 8;

const TAG_OWNER: u16 = 0x01;
const TAG_USER: u16 = 0x02;
const TAG_OWNING_GROUP: u16 = 0x04;
const TAG_GROUP: u16 = 0x08;
const TAG_MASK: u16 = 0x10;
const TAG_OTHERS: u16 = 0x20;

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: AccessIds = AccessIds { user: Some(0), group: Some(0) };

    fn list(entries: &[(u16, u16, u32)]) -> AccessList {
        let mut bytes = LIST_VERSION.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(permissions.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        AccessList::parse(&bytes).unwrap()
    }

    fn access_ids(user: u32, group: u32) -> AccessIds {
        AccessIds { user: Some(user), group: Some(group) }
    }

    #[test]
    fn the_first_class_that_fits_decides() {
        let list = list(&[
            (TAG_OWNER, 7, u32::MAX),
            (TAG_USER, 7, 1001),
            (TAG_USER, 0, 1002),
            (TAG_OWNING_GROUP, 5, u32::MAX),
            (TAG_GROUP, 6, 2000),
            (TAG_MASK, 5, u32::MAX),
            (TAG_OTHERS, 4, u32::MAX),
        ]);
        for (ids, granted) in [
            (access_ids(0, 9), 7),
            (access_ids(1001, 9), 5),
            (access_ids(1002, 9), 0),
            (access_ids(7, 0), 5),
            (access_ids(7, 2000), 4),
            (access_ids(7, 9), 4),
            (AccessIds { user: None, group: None }, 4),
        ] {
            let found: u32 =
                [1, 2, 4].into_iter().filter(|bit| list.grants(*bit, ids, OWNER)).sum();
            assert_eq!(found, granted, "{:?} {:?}", ids.user, ids.group);
        }
        assert!(list.names(4, |id| id == 1001) && !list.names(2, |id| id == 1001));
        assert!(!list.names(1, |id| id == 1002));
    }

    #[test]
    fn what_is_no_list_is_not_read_as_one() {
        for bytes in [&b""[..], &[2, 0, 0], &[3, 0, 0, 0], &[2, 0, 0, 0, 1]] {
            assert!(AccessList::parse(bytes).is_none(), "{bytes:?}");
        }
    }
}

"""The written specification in code: namespaces, chunk keys, object names, objects.

Needs neither torch nor storage. A second implementation of the format can be written from this
package alone.
"""
